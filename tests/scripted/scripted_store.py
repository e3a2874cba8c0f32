"""A hand on the writes of a record store: they can be kept back on their thread, or refused as by a full disk."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from driver_docker.errors import RecordError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from driver_docker.records import RecordStore
    from driver_docker.sandbox_record import RecordPhase, SandboxRecord


class ScriptedWrites:
    """Writes of records in one phase. Used on the event loop, while the writes are on threads."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        """Set when the first of them has come."""
        self.refused = False
        """Whether they fail once they may go on."""
        self._loop = asyncio.get_running_loop()
        self._open = threading.Event()

    def release(self) -> None:
        """Let every write go on."""
        self._open.set()

    def wait(self) -> None:
        """Stand in the way of a write; on its thread."""
        self._loop.call_soon_threadsafe(self.reached.set)
        if not self._open.wait(30):
            raise AssertionError("a write that was kept back was never let go on")
        if self.refused:
            raise RecordError("the record cannot be written: No space left on device")


@contextmanager
def held_saves(store: RecordStore, phase: RecordPhase) -> Iterator[ScriptedWrites]:
    """Keep back the writes of records in one phase until released or left."""
    script = ScriptedWrites()
    with _in_the_way(store, phase, script):
        yield script


@contextmanager
def refused_saves(store: RecordStore, phase: RecordPhase) -> Iterator[ScriptedWrites]:
    """Refuse the writes of records in one phase until left."""
    script = ScriptedWrites()
    script.refused = True
    script.release()
    with _in_the_way(store, phase, script):
        yield script


@contextmanager
def _in_the_way(store: RecordStore, phase: RecordPhase, script: ScriptedWrites) -> Iterator[None]:
    real = store.save

    def save(record: SandboxRecord) -> None:
        if record.phase is phase:
            script.wait()
        real(record)

    owner: Any = store
    owner.save = save
    try:
        yield
    finally:
        del owner.save
        script.release()
