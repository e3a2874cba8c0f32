"""One sandbox from launch to a lost supervisor, on a real Docker Engine, through public commands and the public SDK."""
