"""A proxy on the engine's socket: cuts, silences, delays, half-closes, answers 200 and then nothing, and kills.

It can also end the process behind it at a chosen change that this asks of the engine: before the engine hears of it, or
once the engine has answered and the process does not know yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


class Road(Enum):
    """What happens to whoever connects."""

    OPEN = "open"
    CUT = "cut"
    SILENT = "silent"
    """Requests arrive at the engine, and no answer comes back."""
    HALF_CLOSED = "half closed"
    """The engine's side of every connection is closed after its first bytes; what is sent still arrives."""
    HOLLOW = "hollow"
    """Every request is answered with a 200 whose body never comes."""


class Moment(Enum):
    """When a process is killed at a request."""

    BEFORE = "before"
    """The engine never hears of it."""
    AFTER = "after"
    """The engine has carried it out; the process never reads the answer."""


_CHANGES = (b"POST /", b"PUT /", b"DELETE /")
_REQUESTS = (*_CHANGES, b"GET /", b"HEAD /")
_HOLLOW_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 4096\r\n\r\n{"


@dataclass
class Trap:
    """Kills a process at the n-th change that it asks for."""

    pid: int
    number: int
    moment: Moment
    sprung: str = ""
    """The request that it was killed at."""


@dataclass(eq=False)
class _Connection:
    down: asyncio.StreamWriter
    doomed: str = ""
    asked: bytes = b""
    """The line of the last request."""


class EngineProxy:
    """Stands between a driver and the engine."""

    def __init__(self, path: Path, engine: str) -> None:
        self.path = path
        self._engine = engine.removeprefix("unix://")
        self._road = Road.OPEN
        self._tasks: set[asyncio.Task[None]] = set()
        self.trap: Trap | None = None
        self.delay_seconds = 0.0
        """How late every answer is."""
        self.swallowed = b""
        """Answers to requests with this in their line are not passed on, from now on."""
        self.asked: list[bytes] = []
        """The first line of every request so far."""
        self._server: asyncio.Server

    @property
    def address(self) -> str:
        """For a driver's configuration."""
        return f"unix://{self.path}"

    @property
    def connections(self) -> int:
        """How many there are."""
        return len(self._tasks)

    async def set(self, road: Road) -> None:
        """Change what happens; connections that exist are cut, or fall silent."""
        self._road = road
        if road in {Road.CUT, Road.HALF_CLOSED, Road.HOLLOW}:
            for task in tuple(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if self._road is Road.CUT:
                return
            up_reader, up_writer = await asyncio.open_unix_connection(self._engine)
            try:
                connection = _Connection(writer)
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._send(reader, up_writer, connection))
                    group.create_task(self._answer(up_reader, writer, connection))
            finally:
                up_writer.close()
        except (OSError, BaseExceptionGroup):
            return
        finally:
            writer.close()
            self._tasks.discard(task)

    async def _send(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: _Connection) -> None:
        while data := await reader.read(64 * 1024):
            if data.startswith(_REQUESTS):
                connection.asked = data.split(b"\r\n", 1)[0]
                self.asked.append(connection.asked)
            if self._road is Road.HOLLOW and data.startswith(_REQUESTS):
                connection.down.write(_HOLLOW_ANSWER)
                await connection.down.drain()
                continue
            if self._is_trapped(data):
                line = data.split(b"\r\n", 1)[0].decode("latin-1")
                assert self.trap is not None
                if self.trap.moment is Moment.BEFORE:
                    self._spring(line)
                    await asyncio.Event().wait()
                connection.doomed = line
            if self._road is Road.SILENT:
                await asyncio.Event().wait()
            writer.write(data)
            await writer.drain()
        with contextlib.suppress(OSError):
            writer.write_eof()

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: _Connection
    ) -> None:
        while data := await reader.read(64 * 1024):
            if connection.doomed:
                self._spring(connection.doomed)
                await asyncio.Event().wait()
            if self.swallowed and self.swallowed in connection.asked:
                continue
            if self._road is Road.SILENT:
                await asyncio.Event().wait()
            if self.delay_seconds:
                await asyncio.sleep(self.delay_seconds)
            writer.write(data[:8] if self._road is Road.HALF_CLOSED else data)
            await writer.drain()
            if self._road is Road.HALF_CLOSED:
                break
        with contextlib.suppress(OSError):
            writer.write_eof()

    def _is_trapped(self, data: bytes) -> bool:
        trap = self.trap
        if trap is None or trap.sprung or not data.startswith(_CHANGES):
            return False
        trap.number -= 1
        return trap.number == 0

    def _spring(self, line: str) -> None:
        assert self.trap is not None
        if not self.trap.sprung:
            self.trap.sprung = line
            os.kill(self.trap.pid, signal.SIGKILL)

    @classmethod
    @asynccontextmanager
    async def between(cls, path: Path, engine: str) -> AsyncIterator[EngineProxy]:
        """A proxy that listens."""
        proxy = cls(path, engine)
        proxy._server = await asyncio.start_unix_server(proxy._serve, str(path))
        try:
            yield proxy
        finally:
            proxy._server.close()
            await proxy.set(Road.CUT)
            await proxy._server.wait_closed()
