"""Why a compute driver cannot be reached on its Unix socket: found by trying, told with what to do about it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from openshell.isolation.errors import cause_of

_ANSWER_SECONDS = 1.0
_FRAME_HEADER_BYTES = 9
_FRAME_TYPE_AT = 3
_SETTINGS_TYPE = 4
_EMPTY_SETTINGS = bytes((0, 0, 0, _SETTINGS_TYPE, 0, 0, 0, 0, 0))
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _EMPTY_SETTINGS


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketFault:
    """Why nobody can be reached on a socket."""

    cause: str
    """What was found."""
    cure: str
    """What to do about it."""
    lasting: bool = False
    """Whether waiting does not help: a driver that is only late looks different."""

    def __str__(self) -> str:
        return f"{self.cause}; {self.cure}"


def connection_fault(path: Path) -> SocketFault | None:
    """Look whether a connection to the socket can be made, without waiting; nothing when it can."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            probe.connect(os.fspath(path))
    except BlockingIOError:
        return SocketFault(
            cause="its queue of connections is full", cure="the driver hangs or is overloaded: see its log"
        )
    except OSError as error:
        return _fault_of(path, error)
    return None


async def protocol_fault(path: Path) -> SocketFault | None:
    """Look whether what listens on the socket greets as an HTTP/2 server does, as every gRPC server is one."""
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                writer.write(_HTTP2_PREFACE)
                greeting = await reader.readexactly(_FRAME_HEADER_BYTES)
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except TimeoutError:
        return SocketFault(
            cause="a connection is accepted, but nothing is answered on it",
            cure="the driver is still starting or hangs: see its log",
        )
    except (asyncio.IncompleteReadError, ConnectionError):
        return _foreign()
    except OSError as error:
        return _fault_of(path, error)
    return None if greeting[_FRAME_TYPE_AT] == _SETTINGS_TYPE else _foreign()


def _foreign() -> SocketFault:
    return SocketFault(
        cause="what listens there is not a compute driver: it does not speak gRPC",
        cure="--compute-driver-socket takes the driver's own socket (--bind-socket of openshell-driver-docker), "
        "not the container engine's",
        lasting=True,
    )


def _fault_of(path: Path, error: OSError) -> SocketFault:
    match error.errno:
        case errno.ENOENT | errno.ENOTDIR:
            return SocketFault(
                cause="there is no such file", cure="start the driver, or name its socket with --compute-driver-socket"
            )
        case errno.EACCES | errno.EPERM:
            return SocketFault(
                cause=f"permission denied to user {os.geteuid()}{_ownership(path)}",
                cure="run the gateway as the user that the driver runs as",
                lasting=True,
            )
        case errno.ECONNREFUSED if not _is_socket(path):
            return SocketFault(
                cause="that file is not a socket",
                cure="name the driver's socket with --compute-driver-socket",
                lasting=True,
            )
        case errno.ECONNREFUSED:
            return SocketFault(
                cause="the socket file is there, but nobody listens on it: the driver has ended",
                cure="start the driver",
            )
        case _:
            return SocketFault(
                cause=cause_of(error),
                cure="check that the driver runs and that --compute-driver-socket names its socket",
            )


def _ownership(path: Path) -> str:
    """Whose the first part of the path is that this process may not pass."""
    for part in (*reversed(path.parents), path):
        needed = os.X_OK if part != path else os.W_OK
        try:
            if os.access(part, needed, effective_ids=True):
                continue
            found = part.stat()
        except OSError:
            return ""
        return f"; {part} belongs to user {found.st_uid} and has mode {stat.S_IMODE(found.st_mode):04o}"
    return ""


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.stat().st_mode)
    except OSError:
        return True  # Gone meanwhile: it was one as far as is known.
