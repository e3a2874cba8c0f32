"""The hub behind WatchSandboxes: everybody who watches sees everything, or sees the stream end.

A reader subscribes first and then takes the snapshot it replays, so that nothing falls between the two; what happens
meanwhile waits in its own bounded queue. A reader that falls behind is cut off at once with RESOURCE_EXHAUSTED and
reads everything again: duplicates are harmless, gaps are not (compute-driver contract 3.11).

asyncio only: publish and subscribe belong to the event loop's thread. A handler of the RPC is::

    with hub.subscribe() as reader:
        await reader.deliver(take_snapshot, context.write)
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final, Generic, Self, TypeVar

from driver_docker.errors import DriverError, ShuttingDownError
from openshell.status import StatusCode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

DEFAULT_CAPACITY: Final = 1024
"""Events that may wait for one reader before it is cut off."""

Event = TypeVar("Event")


class SlowReaderError(DriverError):
    """A reader fell further behind than its queue can hold; it must open a new stream and read the snapshot again."""

    default_reason = "SlowReader"
    default_status = StatusCode.RESOURCE_EXHAUSTED
    default_retryable = True


class HubClosedError(ShuttingDownError):
    """No reader gets events any more; the stream can be opened again once the driver is back."""


class WatchHub(Generic[Event]):
    """Hands every published event to every reader.

    Args:
        capacity: Events that may wait for one reader.
    """

    def __init__(self, *, capacity: int = DEFAULT_CAPACITY) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, not {capacity}")
        self._capacity = capacity
        self._readers: set[WatchReader[Event]] = set()
        self._closed = False
        self._cut_off = 0

    @property
    def reader_count(self) -> int:
        """How many readers there are now."""
        return len(self._readers)

    @property
    def cut_off_count(self) -> int:
        """How many readers were cut off for falling behind since the hub was made."""
        return self._cut_off

    def subscribe(self) -> WatchReader[Event]:
        """Register a reader that from now on gets every event; leave it as a context manager or by `close`.

        Raises:
            HubClosedError: The driver is shutting down.
        """
        if self._closed:
            raise _shutting_down()
        reader: WatchReader[Event] = WatchReader(capacity=self._capacity, leave=self._readers.discard)
        self._readers.add(reader)
        return reader

    def publish(self, event: Event) -> None:
        """Hand one event to every reader. Never waits and never fails; slow readers are cut off."""
        for reader in tuple(self._readers):
            if not reader.offer(event):
                self._cut_off += 1

    def close(self) -> None:
        """End every reader with UNAVAILABLE and refuse new ones. Idempotent."""
        self._closed = True
        for reader in tuple(self._readers):
            reader.fail(_shutting_down())


class WatchReader(Generic[Event]):
    """One reader's queue. Made by `WatchHub.subscribe`; one task reads it."""

    def __init__(self, *, capacity: int, leave: Callable[[WatchReader[Event]], None]) -> None:
        self._capacity = capacity
        self._leave = leave
        self._queue: deque[Event] = deque()
        self._failure: DriverError | None = None
        self._changed = asyncio.Event()
        self._failed = asyncio.Event()

    def offer(self, event: Event) -> bool:
        """Queue an event; returns False where that made the reader fall behind and ended it."""
        if len(self._queue) < self._capacity:
            self._queue.append(event)
            self._changed.set()
            return True
        self.fail(
            SlowReaderError(
                f"the watch fell behind by more than {self._capacity} events and was ended so that none is missed; "
                "open it again to get the full state"
            )
        )
        return False

    def fail(self, error: DriverError) -> None:
        """End the reader: what still waits is dropped and reading raises the error. Only the first failure counts."""
        if self._failure is None:
            self._failure = error
            self._queue.clear()
            self._leave(self)
            self._changed.set()
            self._failed.set()

    def close(self) -> None:
        """Leave the hub. Idempotent; a task that still reads gets `HubClosedError`."""
        self.fail(HubClosedError("the watch was closed"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        """Wait for the next event.

        Raises:
            SlowReaderError: This reader fell behind.
            HubClosedError: The driver is shutting down, or the reader was closed.
        """
        while True:
            if self._failure is not None:
                raise self._failure
            if self._queue:
                return self._queue.popleft()
            self._changed.clear()
            await self._changed.wait()

    async def deliver(
        self,
        take_snapshot: Callable[[], Awaitable[Iterable[Event]]],
        write: Callable[[Event], Awaitable[object]],
    ) -> None:
        """Write the snapshot and then every event, until the reader ends. Returns by raising only.

        A write that hangs because the peer does not read is given up as soon as the reader is cut off.

        Args:
            take_snapshot: Reads the full state; called once, after the subscription.
            write: Sends one event to the peer.

        Raises:
            SlowReaderError: The peer fell behind.
            HubClosedError: The driver is shutting down.
        """
        pump = asyncio.create_task(self._pump(take_snapshot, write))
        failed = asyncio.create_task(self._failed.wait())
        try:
            await asyncio.wait({pump, failed}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                # Its own error first: a snapshot that could not be read says more than the end of the reader.
                await pump
            if self._failure is not None:
                raise self._failure
        finally:
            for task in (pump, failed):
                task.cancel()
            await asyncio.gather(pump, failed, return_exceptions=True)

    async def _pump(
        self,
        take_snapshot: Callable[[], Awaitable[Iterable[Event]]],
        write: Callable[[Event], Awaitable[object]],
    ) -> None:
        for event in await take_snapshot():
            await write(event)
        async for event in self:
            await write(event)


def _shutting_down() -> HubClosedError:
    return HubClosedError("the driver is shutting down; open the watch again once it is back")
