"""Fan-out of a sandbox's changes and events to its watchers: replay, then live, never a silent gap.

Everything here runs in the event loop's thread and never waits: publishing is cheap and a reader that does not keep up
loses its stream (RESOURCE_EXHAUSTED) instead of an event.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from types import TracebackType
from typing import Self

from gateway_embedded.errors import CursorExpiredError, SlowReaderError
from gateway_embedded.sandboxes import PlatformEvent, SandboxRecord

READER_LIMIT = 256
"""Items that may wait for one reader."""

TAIL_LIMIT = 256
"""Ordinary events kept for each sandbox."""

PINNED_LIMIT = 64
"""Warnings kept for each sandbox beside the tail, so that progress events cannot push a verdict out."""

VERDICT_PREFIX = "openshell.verdict."
"""Metadata keys of a verdict begin with this; such an event is kept like a warning whatever its type."""


class Change(Enum):
    """What happened to a sandbox besides an event."""

    REMOVED = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamItem:
    """One item of a watch: a changed record, an event of the platform, or the end of the sandbox."""

    number: int
    content: SandboxRecord | PlatformEvent | Change


@dataclass(slots=True)
class _Topic:
    tail: deque[StreamItem] = field(default_factory=lambda: deque(maxlen=TAIL_LIMIT))
    pinned: deque[StreamItem] = field(default_factory=lambda: deque(maxlen=PINNED_LIMIT))
    lost: int = 0
    """Number of the newest event that is no longer kept."""
    readers: set[Subscription] = field(default_factory=set)

    def keep(self, item: StreamItem, *, lasting: bool) -> None:
        """Add an event, at the cost of the oldest of its kind when there are too many."""
        kind = self.pinned if lasting else self.tail
        if len(kind) == kind.maxlen:
            self.lost = max(self.lost, kind[0].number)
        kind.append(item)

    def kept(self) -> list[StreamItem]:
        """Every kept event once, oldest first."""
        return sorted({item.number: item for item in (*self.pinned, *self.tail)}.values(), key=lambda item: item.number)


class EventHub:
    """Events and changes of all sandboxes of one gateway process."""

    def __init__(self, *, reader_limit: int = READER_LIMIT) -> None:
        self._topics: dict[str, _Topic] = {}
        self._number = 0
        self._reader_limit = reader_limit
        self._epoch = secrets.token_hex(4)

    def restore(self, events: Iterable[tuple[str, PlatformEvent]]) -> None:
        """Put back the warnings that an earlier process stored."""
        for sandbox_id, event in events:
            self._topic(sandbox_id).keep(self._item(event), lasting=True)

    def publish_event(self, sandbox_id: str, event: PlatformEvent) -> None:
        """Keep an event and hand it to every reader."""
        topic = self._topic(sandbox_id)
        item = self._item(event)
        topic.keep(item, lasting=is_lasting(event))
        self._hand_out(topic, item)

    def publish_record(self, record: SandboxRecord) -> None:
        """Hand a changed sandbox to every reader."""
        self._hand_out(self._topic(record.id), self._item(record))

    def publish_removal(self, sandbox_id: str) -> None:
        """Tell every reader that the sandbox is gone, and forget it."""
        topic = self._topics.pop(sandbox_id, None)
        if topic is not None:
            self._hand_out(topic, self._item(Change.REMOVED))

    def subscribe(self, sandbox_id: str, *, event_tail: int = 0, resume_after: str = "") -> Subscription:
        """Start to receive what happens from now on, with the events before that the caller asks for.

        Args:
            sandbox_id: The sandbox to watch.
            event_tail: How many earlier events to hand out first.
            resume_after: Cursor of the last item that was processed; every later event is handed out first.

        Raises:
            CursorExpiredError: The cursor is of another process, or events behind it are no longer kept.
        """
        topic = self._topic(sandbox_id)
        kept = topic.kept()
        if resume_after:
            after = self._parse(resume_after)
            if after < topic.lost:
                raise CursorExpiredError("events after this cursor are no longer kept; drop the cursor and watch again")
            earlier = [item for item in kept if item.number > after]
        else:
            earlier = kept[-event_tail:] if event_tail else []
        subscription = Subscription(self, sandbox_id, earlier=earlier, limit=self._reader_limit)
        topic.readers.add(subscription)
        return subscription

    def cursor(self, number: int) -> str:
        """The cursor that stands for an item's number in this process."""
        return f"{self._epoch}-{number}"

    @property
    def latest(self) -> int:
        """Number of the newest item."""
        return self._number

    def end(self) -> None:
        """End every stream; used when the gateway stops."""
        for topic in self._topics.values():
            for reader in tuple(topic.readers):
                reader.end()

    def drop(self, subscription: Subscription) -> None:
        """Forget a reader."""
        topic = self._topics.get(subscription.sandbox_id)
        if topic is None:
            return
        topic.readers.discard(subscription)
        if not (topic.readers or topic.tail or topic.pinned):
            del self._topics[subscription.sandbox_id]

    def _parse(self, cursor: str) -> int:
        epoch, _, number = cursor.partition("-")
        if epoch != self._epoch or not number.isascii() or not number.isdigit() or len(number) > 19:
            raise CursorExpiredError("the cursor is not of this gateway process; drop it and watch again")
        if int(number) > self._number:
            raise CursorExpiredError("the cursor is ahead of this gateway; drop it and watch again")
        return int(number)

    def _item(self, content: SandboxRecord | PlatformEvent | Change) -> StreamItem:
        self._number += 1
        return StreamItem(number=self._number, content=content)

    def _topic(self, sandbox_id: str) -> _Topic:
        return self._topics.setdefault(sandbox_id, _Topic())

    @staticmethod
    def _hand_out(topic: _Topic, item: StreamItem) -> None:
        for reader in tuple(topic.readers):
            reader.offer(item)


class Subscription:
    """One reader of one sandbox. Use it as a context manager; `get` waits for the next item."""

    def __init__(self, hub: EventHub, sandbox_id: str, *, earlier: list[StreamItem], limit: int) -> None:
        self.sandbox_id = sandbox_id
        self.earlier = earlier
        """Events from before the subscription, oldest first."""
        self._hub = hub
        self._limit = limit
        self._items: deque[StreamItem] = deque()
        self._fell_behind = False
        self._ended = False
        self._wake = asyncio.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hub.drop(self)

    def offer(self, item: StreamItem) -> None:
        """Queue an item, or give the reader up when too many wait."""
        if self._fell_behind:
            return
        if len(self._items) >= self._limit:
            self._fell_behind = True
            self._items.clear()
        else:
            self._items.append(item)
        self._wake.set()

    def end(self) -> None:
        """Let the reader take what is queued, then end."""
        self._ended = True
        self._wake.set()

    async def get(self) -> StreamItem | None:
        """The next item, or nothing when the gateway ended the stream.

        Raises:
            SlowReaderError: The reader fell behind.
        """
        while True:
            if self._fell_behind:
                raise SlowReaderError(
                    f"the watch of sandbox {self.sandbox_id} fell more than {self._limit} items behind and was ended; "
                    "watch again from the last cursor"
                )
            if self._items:
                return self._items.popleft()
            if self._ended:
                return None
            self._wake.clear()
            await self._wake.wait()


def is_lasting(event: PlatformEvent) -> bool:
    """Whether an event is a warning or a verdict, which are kept apart from progress and across restarts."""
    return event.type == "Warning" or any(key.startswith(VERDICT_PREFIX) for key in event.metadata)
