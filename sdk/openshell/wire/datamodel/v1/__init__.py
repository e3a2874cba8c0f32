"""Generated protobuf and grpc modules of openshell.datamodel.v1."""
