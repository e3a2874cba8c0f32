"""Addresses of the configuration that supervisors are shown: scheme, host and port, and nothing else. Pure."""

from __future__ import annotations

from urllib.parse import urlsplit


class AddressCredentialsError(ValueError):
    """An address holds credentials."""


def check_http_address(address: str) -> None:
    """Check `http://host[:port]` or `https://host[:port]`.

    Args:
        address: What is configured. A supervisor gets it on its command line or in its environment, which whoever may
            inspect containers can read.

    Raises:
        AddressCredentialsError: It holds credentials.
        ValueError: It is none, holds a path or a query, or names port 0. The text never quotes it, since
            it may hold a password; it does not name the key either.
    """
    plain = "must be http://host:port or https://host:port"
    try:
        parts = urlsplit(address)
        hostname, credentials = parts.hostname, "@" in parts.netloc
    except ValueError:
        raise ValueError(plain) from None
    if credentials:
        raise AddressCredentialsError("must not hold credentials")
    try:
        port = parts.port
    except ValueError:
        raise ValueError("names a port beyond 65535, or one that is no number") from None
    if port == 0:
        raise ValueError("must name a port other than 0")
    # The parser drops some characters in silence, so the text itself is looked at.
    spaced = not address.isprintable() or any(char.isspace() for char in address)
    if parts.scheme not in {"http", "https"} or not hostname or parts.path not in {"", "/"} or spaced:
        raise ValueError(plain)
    if any(char in address for char in "?#\\"):
        raise ValueError(plain)
