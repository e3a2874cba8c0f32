"""The engine's event stream: one reading thread, bridged to asyncio, that can be ended while it waits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from typing import TYPE_CHECKING, Final

import urllib3

from driver_docker.engine import EngineError, EngineUnreachableError
from driver_docker.engine_http import shaped, shut_down
from driver_docker.engine_objects import EngineEvent
from driver_docker.engine_wire import engine_event

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    import requests

MAX_WAITING: Final = 4096
"""Events that may wait for their reader."""


class DockerEventStream:
    """One accepted `/events` answer. The thread ends with the connection, and the connection with `close`."""

    def __init__(self, answer: requests.Response, *, on_close: Callable[[DockerEventStream], None]) -> None:
        self._answer = answer
        self._on_close = on_close
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[EngineEvent | None] = asyncio.Queue()
        self._closed = False
        self._fell_behind = False
        self._unreadable = ""
        self._thread = threading.Thread(target=self._read, name="engine-events", daemon=True)
        self._thread.start()

    def __aiter__(self) -> AsyncIterator[EngineEvent]:
        """Iterate over events as they arrive; losing the connection raises `EngineUnreachableError`."""
        return self._events()

    async def _events(self) -> AsyncIterator[EngineEvent]:
        while True:
            event = await self._queue.get()
            if event is not None:
                yield event
                continue
            if self._closed:
                return
            if self._fell_behind:
                raise EngineUnreachableError(
                    f"more than {MAX_WAITING} events of the engine are waiting; they are dropped, and everything is "
                    "looked at again"
                )
            if self._unreadable:
                raise EngineUnreachableError(self._unreadable)
            raise EngineUnreachableError("the engine's event stream ended")

    def _read(self) -> None:
        try:
            for line in self._lines():
                self._put(shaped(engine_event, json.loads(line), "an event"))
        except (OSError, AttributeError, urllib3.exceptions.HTTPError):
            pass  # a cut, or our own close: the end mark says so, and `_closed` which of the two
        except EngineError as error:
            self._unreadable = error.message
        except Exception as error:
            # An event that is left out would be a gap that nobody knows of; an end has everything looked at again.
            self._unreadable = f"an event of the engine cannot be understood ({type(error).__name__})"
        finally:
            self._put(None)

    def _lines(self) -> Iterator[bytes]:
        """Complete lines as soon as they are there: `read1` returns what has arrived instead of filling a buffer."""
        pending = b""
        raw = self._answer.raw
        while chunk := raw.read1(64 * 1024):
            *lines, pending = (pending + chunk).split(b"\n")
            yield from (line for line in lines if line.strip())

    def _put(self, event: EngineEvent | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(self._accept, event)

    def _accept(self, event: EngineEvent | None) -> None:
        """Queue an event for a reader that keeps up; for one that does not, an end is better than growing memory."""
        if self._fell_behind:
            return
        if self._queue.qsize() < MAX_WAITING:
            self._queue.put_nowait(event)
            return
        self._fell_behind = True
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(None)

    async def close(self) -> None:
        """End the subscription and its connection. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._on_close(self)
        self._queue.put_nowait(None)
        shut_down(self._answer)
