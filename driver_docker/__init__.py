"""The Docker compute driver: turns a gateway's launch into containers and says why they ended."""
