"""What ``./dev`` calls: the engine, images, code generation and checks. Not part of the distribution."""
