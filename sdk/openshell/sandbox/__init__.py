"""Messages of a sandbox's policy and configuration."""
