"""Generated protobuf and grpc modules of openshell.sandbox."""
