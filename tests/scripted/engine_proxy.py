"""A proxy on the engine's socket that can cut every connection, refuse new ones, or take them and never answer."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import asynccontextmanager
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


class EngineProxy:
    """Stands between a driver and the engine."""

    def __init__(self, path: Path, engine: str) -> None:
        self.path = path
        self._engine = engine.removeprefix("unix://")
        self._road = Road.OPEN
        self._tasks: set[asyncio.Task[None]] = set()
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
        if road is Road.CUT:
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
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._pump(reader, up_writer))
                    group.create_task(self._pump(up_reader, writer))
            finally:
                up_writer.close()
        except (OSError, BaseExceptionGroup):
            return
        finally:
            writer.close()
            self._tasks.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(64 * 1024):
            if self._road is Road.SILENT:
                await asyncio.Event().wait()
            writer.write(data)
            await writer.drain()
        with contextlib.suppress(OSError):
            writer.write_eof()

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
