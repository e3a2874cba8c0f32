"""The sandbox runtime: PID 1 of a workload container and the built-in isolation backend."""
