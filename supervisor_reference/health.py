"""Saying that the session is ready: a Unix socket that exists only meanwhile (isolation contract 1), and one line."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from typing import TYPE_CHECKING

from openshell.ready_line import READY_LINE
from supervisor_reference.probe import READY_ANSWER

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


def say_ready() -> None:
    """Write the line that saves the driver the health command, on standard error."""
    # Nobody may hold the other end any more; the command still tells.
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{READY_LINE}\n")  # at once: a log record of another thread must not come between
        sys.stderr.flush()


@contextlib.asynccontextmanager
async def readiness_listener(path: Path | None) -> AsyncIterator[None]:
    """Serve readiness on a Unix socket for as long as the context lasts.

    Args:
        path: Where the socket appears; its folder is made when missing. None serves nothing.

    Raises:
        OSError: The socket cannot be made.
    """
    if path is None:
        yield
        return
    server = await asyncio.start_unix_server(_answer, sock=_bind(path))
    try:
        yield
    finally:
        # The name goes first: from here on nobody may find it, even if closing takes a moment.
        _remove(path)
        server.close()
        await server.wait_closed()


def _bind(path: Path) -> socket.socket:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(0o600)
    except BaseException:
        listener.close()
        raise
    return listener


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    del reader
    with contextlib.suppress(OSError):
        writer.write(READY_ANSWER)
        await writer.drain()
    writer.close()
