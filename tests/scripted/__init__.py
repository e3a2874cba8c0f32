"""Peers that answer from a script, over real transports, for what the real ones cannot be made to show on demand."""
