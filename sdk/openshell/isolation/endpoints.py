"""Where a boundary listens and where its supervisor connects (compute-driver contract 5.6, isolation contract 2.5)."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

from openshell.isolation.errors import DocumentError
from openshell.isolation.json_fields import U32_MAX, Fields, JsonObject, check_absolute

ENDPOINT_ERROR = "invalid boundary control transport endpoint"
MAX_SOCKET_PATH_BYTES = 107
"""Longest path of a Unix socket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerTls:
    """Where the runtime finds its certificate chain and private key.

    Attributes:
        certificate_chain_path: PEM chain of the server leaf.
        private_key_path: PKCS#8 PEM key.
    """

    certificate_chain_path: str
    private_key_path: str

    def to_object(self) -> JsonObject:
        """The JSON object."""
        return {
            "certificate_chain_path": self.certificate_chain_path,
            "private_key_path": self.private_key_path,
        }

    @classmethod
    def from_fields(cls, fields: Fields) -> ListenerTls:
        """Read the JSON object."""
        tls = cls(
            certificate_chain_path=check_absolute(
                fields.text("certificate_chain_path"), fields.path("certificate_chain_path")
            ),
            private_key_path=check_absolute(fields.text("private_key_path"), fields.path("private_key_path")),
        )
        fields.finish()
        return tls


@dataclass(frozen=True, slots=True, kw_only=True)
class UnixListener:
    """Listen on a Unix socket, whose path has at most 107 bytes."""

    socket_path: str
    tls: ListenerTls

    def __post_init__(self) -> None:
        check_socket_path(self.socket_path, "listener.socket_path")

    def to_object(self) -> JsonObject:
        """The JSON object."""
        return {"kind": "unix", "socket_path": self.socket_path, "tls": self.tls.to_object()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpListener:
    """Listen on a TCP address, ``ip:port``."""

    address: str
    tls: ListenerTls

    def to_object(self) -> JsonObject:
        """The JSON object."""
        return {"kind": "tls-tcp", "address": self.address, "tls": self.tls.to_object()}


@dataclass(frozen=True, slots=True, kw_only=True)
class VsockListener:
    """Listen on a vsock port of the guest."""

    control_port: int
    tls: ListenerTls

    def to_object(self) -> JsonObject:
        """The JSON object."""
        return {"kind": "vsock", "control_port": self.control_port, "tls": self.tls.to_object()}


Listener = UnixListener | TcpListener | VsockListener


def read_listener(fields: Fields) -> Listener:
    """Read a listener by its ``kind``.

    Raises:
        DocumentError: unknown kind, or a member is wrong.
    """
    kind = fields.text("kind")
    tls = ListenerTls.from_fields(fields.fields("tls"))
    listener: Listener
    if kind == "unix":
        where = fields.path("socket_path")
        path = check_socket_path(check_absolute(fields.text("socket_path"), where), where)
        listener = UnixListener(socket_path=path, tls=tls)
    elif kind == "tls-tcp":
        address = fields.text("address")
        check_socket_address(address, fields.path("address"), listening=True)
        listener = TcpListener(address=address, tls=tls)
    elif kind == "vsock":
        listener = VsockListener(control_port=fields.integer("control_port", minimum=1, maximum=U32_MAX - 1), tls=tls)
    else:
        raise fields.error("kind", "must be unix, tls-tcp or vsock")
    fields.finish()
    return listener


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportTls:
    """What a client trusts: one name under one trust anchor, nothing of the system's."""

    server_name: str
    trust_anchor_pem: str = field(repr=False)

    def to_object(self) -> JsonObject:
        """The JSON object."""
        return {"server_name": self.server_name, "trust_anchor_pem": self.trust_anchor_pem}

    @classmethod
    def from_fields(cls, fields: Fields) -> TransportTls:
        """Read the JSON object."""
        tls = cls(
            server_name=fields.text("server_name", max_bytes=253), trust_anchor_pem=fields.text("trust_anchor_pem")
        )
        fields.finish()
        return tls


@dataclass(frozen=True, slots=True, kw_only=True)
class UnixTransport:
    """Connect to a Unix socket, whose path has at most 107 bytes."""

    socket_path: str

    def __post_init__(self) -> None:
        check_socket_path(self.socket_path, "transport.socket_path")

    def to_object(self) -> JsonObject:
        """The JSON object."""
        return {"kind": "unix", "socket_path": self.socket_path}


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpTransport:
    """Connect to one of several TCP addresses, each ``ip:port``."""

    authority: str
    addresses: tuple[str, ...]

    def to_object(self) -> JsonObject:
        """The JSON object."""
        return {"kind": "tcp", "authority": self.authority, "addresses": list(self.addresses)}


@dataclass(frozen=True, slots=True, kw_only=True)
class VsockTransport:
    """Connect to a vsock port of a guest."""

    guest_cid: int
    port: int

    def to_object(self) -> JsonObject:
        """The JSON object."""
        return {"kind": "vsock", "guest_cid": self.guest_cid, "port": self.port}


Transport = UnixTransport | TcpTransport | VsockTransport


def read_transport(fields: Fields) -> Transport:
    """Read a transport by its ``kind`` (rules of isolation contract 2.5).

    Raises:
        DocumentError: with the contract's text ``invalid boundary control transport endpoint``, or with the limit that
            a socket's path exceeds.
    """
    kind = fields.text("kind")
    transport: Transport
    if kind == "unix":
        path = fields.text("socket_path")
        if not path.startswith("/") or "\0" in path:
            raise fields.error("socket_path", ENDPOINT_ERROR)
        check_socket_path(path, fields.path("socket_path"))
        transport = UnixTransport(socket_path=path)
    elif kind == "tcp":
        addresses = fields.texts("addresses")
        if not addresses:
            raise fields.error("addresses", ENDPOINT_ERROR)
        for index, address in enumerate(addresses):
            check_socket_address(address, f"{fields.path('addresses')}[{index}]")
        transport = TcpTransport(authority=fields.text("authority"), addresses=addresses)
    elif kind == "vsock":
        transport = VsockTransport(
            guest_cid=fields.integer("guest_cid", minimum=3, maximum=U32_MAX - 1),
            port=fields.integer("port", minimum=1, maximum=U32_MAX - 1),
        )
    else:
        raise fields.error("kind", ENDPOINT_ERROR)
    fields.finish()
    return transport


def check_socket_path(path: str, where: str) -> str:
    """Check that a path is short enough for a Unix socket.

    Args:
        path: the path.
        where: the member or setting that holds it, for the error's text.

    Raises:
        DocumentError: with its length and the limit.
    """
    length = len(path.encode("utf-8", "surrogateescape"))
    if length > MAX_SOCKET_PATH_BYTES:
        raise DocumentError(
            where, f"has {length} bytes; a Unix socket's path has at most {MAX_SOCKET_PATH_BYTES} bytes"
        )
    return path


def check_socket_address(address: str, path: str, *, listening: bool = False) -> tuple[str, int]:
    """Split ``ip:port`` or ``[ip6]:port``; port 0 is refused, the unspecified address too unless listening.

    Returns:
        The host without brackets, and the port.

    Raises:
        DocumentError: with the contract's endpoint text.
    """
    host, _, port_text = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        ip = ipaddress.ip_address(bare)
        port = int(port_text) if port_text.isascii() and port_text.isdigit() else 0
    except ValueError:
        raise DocumentError(path, ENDPOINT_ERROR) from None
    bracketed = bare != host
    if not 0 < port < 65536 or (ip.is_unspecified and not listening) or bracketed != (ip.version == 6):
        raise DocumentError(path, ENDPOINT_ERROR)
    return bare, port
