"""Messages shared by the public packages."""
