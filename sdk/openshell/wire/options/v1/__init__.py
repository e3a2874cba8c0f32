"""Generated protobuf and grpc modules of openshell.options.v1."""
