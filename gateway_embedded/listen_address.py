"""The address that the gateway listens on: read from its option, and tried before grpc does."""

from __future__ import annotations

import errno
import socket

from openshell.isolation.errors import cause_of

_LARGEST_PORT = 65535


def split_address(text: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``; an IPv6 host stands in brackets.

    Raises:
        ValueError: It is not of that form.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit():
        raise ValueError(f"--listen takes HOST:PORT, not {text!r}")
    if int(port) > _LARGEST_PORT:
        raise ValueError(f"--listen takes a port from 0 (any free one) to {_LARGEST_PORT}, not {port}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def binding_fault(host: str, port: int) -> str:
    """Why an address cannot be listened on, and what to do; empty when it can, or when nothing is known against it.

    grpc itself tells no cause, and writes lines of its own to standard error.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        return f"{host} has no address: {cause_of(error)}; choose another address with --listen"
    faults: list[str] = []
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError as error:
            faults.append(f"{cause_of(error).lower()}; {_cure_of(error)}")
        else:
            return ""
    return faults[0]


def _cure_of(error: OSError) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return "end what uses it, or choose another port with --listen (0 takes any free one)"
        case errno.EACCES | errno.EPERM:
            return "choose a port that this user may listen on with --listen (0 takes any free one)"
        case _:
            return "choose another address with --listen"
