"""Generated betterproto2 types; the public names are re-exported."""
