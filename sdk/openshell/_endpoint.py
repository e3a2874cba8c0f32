"""Where a gateway is, and how to open a channel to it."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from openshell.errors import InvalidArgumentError

if TYPE_CHECKING:
    from pathlib import Path

    import grpc

_LOCAL_NAMES = frozenset({"localhost"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """Files for TLS to a gateway."""

    ca_path: Path | None = None
    """Trust anchors in PEM; None takes grpc's own."""
    cert_path: Path | None = None
    """Client certificate in PEM; needs ``key_path``."""
    key_path: Path | None = None
    """Private key of the client certificate in PEM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelOptions:
    """How the connection to a gateway behaves."""

    keepalive_time_seconds: float = 30.0
    """Pause after which an idle connection with calls in flight is probed."""
    keepalive_timeout_seconds: float = 15.0
    """How long an answer to a probe may take before the connection counts as lost."""
    max_receive_bytes: int = 16 * 1024 * 1024
    """Largest message that is accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A parsed ``http://`` or ``https://`` address of a gateway."""

    secure: bool
    """Whether TLS is spoken."""
    host: str
    """Host name or IP address, without brackets."""
    port: int
    """TCP port, 1 to 65535."""

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """Parse an address such as ``http://127.0.0.1:17670`` or ``https://[::1]:443``.

        Raises:
            InvalidArgumentError: It is not such an address; the text says what is wrong with it.
        """
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError as error:
            raise InvalidArgumentError(f"gateway endpoint {text!r}: {error}") from error
        if parts.scheme not in {"http", "https"}:
            raise InvalidArgumentError(f"gateway endpoint {text!r} must start with http:// or https://")
        if parts.username is not None or parts.password is not None:
            raise InvalidArgumentError("a gateway endpoint must not hold credentials; pass a token instead")
        if not parts.hostname:
            raise InvalidArgumentError(f"gateway endpoint {text!r} names no host")
        if parts.path not in {"", "/"} or parts.query or parts.fragment:
            raise InvalidArgumentError(f"gateway endpoint {text!r} must be scheme, host and port only")
        if port == 0:
            raise InvalidArgumentError(f"gateway endpoint {text!r}: port 0 cannot be connected to")
        secure = parts.scheme == "https"
        return cls(secure=secure, host=parts.hostname, port=port or (443 if secure else 80))

    @property
    def authority(self) -> str:
        """``host:port``, with brackets round an IPv6 address."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether traffic stays on this machine. A wildcard address does not count."""
        if self.host in _LOCAL_NAMES:
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        """The address as it is shown to people."""
        return f"{'https' if self.secure else 'http'}://{self.authority}"


def channel_arguments(options: ChannelOptions) -> list[tuple[str, int]]:
    """Options of a grpc channel."""
    return [
        ("grpc.keepalive_time_ms", int(options.keepalive_time_seconds * 1000)),
        ("grpc.keepalive_timeout_ms", int(options.keepalive_timeout_seconds * 1000)),
        ("grpc.max_receive_message_length", options.max_receive_bytes),
        ("grpc.enable_http_proxy", 0),
    ]


def channel_credentials(tls: TlsConfig | None) -> grpc.ChannelCredentials:
    """TLS credentials from files.

    Raises:
        InvalidArgumentError: A file cannot be read, or only one of certificate and key is given.
    """
    import grpc

    tls = tls or TlsConfig()
    if (tls.cert_path is None) != (tls.key_path is None):
        raise InvalidArgumentError("TlsConfig needs cert_path and key_path together")
    return grpc.ssl_channel_credentials(_read(tls.ca_path), _read(tls.key_path), _read(tls.cert_path))


def _read(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidArgumentError(f"cannot read TLS file {path}: {error.strerror}") from error
