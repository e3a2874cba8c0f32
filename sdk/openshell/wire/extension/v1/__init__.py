"""Generated protobuf and grpc modules of openshell.extension.v1."""
