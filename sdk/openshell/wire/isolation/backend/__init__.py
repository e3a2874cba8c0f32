"""Generated protobuf and grpc modules of openshell.isolation.backend."""
