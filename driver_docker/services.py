"""What the driver's parts share: the engine, the configuration, the records, the table, and where events go."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TypeVar

import structlog

from driver_docker import events
from driver_docker.concurrency import KeyedLocks
from driver_docker.errors import RecordError
from driver_docker.exit_journal import ExitJournal, JournalEntry
from driver_docker.metrics import Metrics
from driver_docker.snapshots import take_snapshot
from driver_docker.workers import NoWorkerError, WorkerPool

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from driver_docker.config import DriverConfig
    from driver_docker.engine import Engine
    from driver_docker.events import Snapshot, WatchEvent
    from driver_docker.handshake import Handshake
    from driver_docker.labels import Owner
    from driver_docker.launch_gate import LaunchGate
    from driver_docker.records import RecordStore
    from driver_docker.sandboxes import Sandbox, SandboxTable
    from openshell.verdicts import Verdict

Result = TypeVar("Result")


def now() -> datetime:
    """The present, in UTC."""
    return datetime.now(UTC)


@dataclass(slots=True, kw_only=True)
class Services:
    """One driver's surroundings."""

    engine: Engine
    config: DriverConfig
    owner: Owner
    store: RecordStore
    table: SandboxTable
    handshake: Handshake
    """Which gateway is served."""
    gate: LaunchGate
    """What every launch and every re-creation of a supervisor passes first."""
    publish: Callable[[WatchEvent], None]
    """Hands one event to every watcher; never blocks, never raises."""
    watched: Callable[[], bool] = lambda: False
    """Whether anybody watches now, and so has what was published last."""
    metrics: Metrics = field(default_factory=Metrics)
    engine_events: Callable[[bool], None] = lambda _connected: None
    """Told whether the engine's events are being read now, at each change."""
    event_stream: int = 0
    """Number of the engine's event stream that is read now; each reconnect gets the next."""
    events_are_read: bool = False
    """Whether the engine's events are being read: what happens is told without being asked for."""
    folder_lost: bool = False
    """Whether the state folder was found not to be this driver's any more."""
    log: structlog.stdlib.BoundLogger = field(default_factory=lambda: structlog.get_logger("driver"))
    disk: WorkerPool = field(default_factory=lambda: WorkerPool("records", max_threads=2))
    _writes: KeyedLocks = field(default_factory=KeyedLocks)

    @property
    def journal(self) -> ExitJournal:
        """The last verdicts of this namespace, those of deleted sandboxes included."""
        return ExitJournal(self.store.directory)

    def log_of(self, sandbox: Sandbox) -> structlog.stdlib.BoundLogger:
        """The log with the sandbox's id and generation."""
        return self.log.bind(sandbox_id=sandbox.sandbox_id, generation=sandbox.record.generation)

    def snapshot(self, sandbox: Sandbox) -> Snapshot:
        """The observable state of a sandbox now."""
        return take_snapshot(
            sandbox.record,
            sandbox.workload,
            namespace=self.owner.namespace,
            supervisor_paused=sandbox.supervisor_is_paused,
        )

    def publish_snapshot(self, sandbox: Sandbox) -> None:
        """Tell watchers the state of a sandbox."""
        self.publish(self.snapshot(sandbox))

    def tell_failure(self, sandbox: Sandbox) -> bool:
        """Tell watchers why a sandbox failed, and then its state; whether anybody watched.

        The event comes first: who stops watching at the terminal snapshot has the verdict. Where nobody watches, the
        record remembers it for the next watch.
        """
        failure = sandbox.record.failure
        if failure is None:
            return False
        self.publish(events.failed(sandbox.record, failure))
        told = self.watched()
        sandbox.record = replace(sandbox.record, failure=replace(failure, untold=not told))
        self.publish_snapshot(sandbox)
        return told

    async def tell_untold(self, write: Callable[[WatchEvent], Awaitable[object]]) -> None:
        """Tell a new watcher of the failures that were published when nobody watched, each once.

        Args:
            write: Sends one event to this watcher alone.
        """
        for sandbox in tuple(self.table):
            failure = sandbox.record.failure
            if failure is None or not failure.untold:
                continue
            # Before it is written: a second watcher that begins meanwhile is not told too.
            told = replace(failure, untold=False)
            sandbox.record = replace(sandbox.record, failure=told)
            try:
                await write(events.failed(sandbox.record, failure))
            except BaseException:
                if sandbox.record.failure is told:
                    sandbox.record = replace(sandbox.record, failure=failure)
                raise
            await self.save_quietly(sandbox)

    async def save(self, sandbox: Sandbox) -> None:
        """Write the record as it is when its turn comes: a later save never loses to an earlier one.

        Like every write here, it comes to nothing for an entry that is not in the table any more: nothing may come
        back to the folder of a sandbox that was deleted, or that another one has followed.

        Raises:
            RecordError: The disk refused.
        """
        async with self._writes.of(sandbox.sandbox_id):
            if not self.table.holds(sandbox):
                return
            record, sandbox.unsaved = sandbox.record, True
            await self._on_disk(lambda: self.store.save(record))
            sandbox.unsaved = False

    async def save_quietly(self, sandbox: Sandbox) -> None:
        """Write the record; a disk that refuses is logged, because what is recorded has happened all the same.

        It is tried again at each look.
        """
        try:
            await self.save(sandbox)
        except RecordError as error:
            self.log_of(sandbox).error("record not written", error=error.message)

    async def save_unsaved(self) -> None:
        """Write the records that the disk refused before."""
        for sandbox in self.table:
            if sandbox.unsaved:
                await self.save_quietly(sandbox)

    async def look_at_folder(self) -> None:
        """Say so, once, where the state folder is not this driver's any more."""
        try:
            name = await self.disk.run(self.store.driver_name)
        except (RecordError, NoWorkerError):
            return  # that says nothing about whose it is
        is_lost = name != self.owner.driver
        if is_lost and not self.folder_lost:
            self.log.error(
                "the state folder was removed or replaced under this driver, and another driver may use it; "
                "restore it, or end this driver and start it again",
                folder=str(self.store.directory),
                driver_owner=self.owner.driver,
            )
        self.folder_lost = is_lost

    async def save_files(self, sandbox: Sandbox, files: Mapping[str, bytes]) -> None:
        """Write launch files of a sandbox.

        Raises:
            RecordError: The disk refused.
        """
        await self._change(sandbox, lambda: self.store.save_files(sandbox.sandbox_id, files))

    async def commit_files(self, sandbox: Sandbox, files: Mapping[str, bytes], *, last: str) -> None:
        """Replace a set of launch files that count together.

        Raises:
            RecordError: The disk refused; the set does not count.
        """
        await self._change(sandbox, lambda: self.store.commit_files(sandbox.sandbox_id, files, last=last))

    async def remove_files(self, sandbox: Sandbox, names: Iterable[str]) -> bool:
        """Remove launch files; a disk that refuses is logged.

        They go again with the whole folder.

        Returns:
            Whether they are gone.
        """
        try:
            await self._change(sandbox, lambda: self.store.remove_files(sandbox.sandbox_id, names))
        except RecordError as error:
            self.log_of(sandbox).error("launch files not removed", error=error.message)
            return False
        return True

    async def record_exit(self, sandbox: Sandbox, verdict: Verdict, tail: str) -> None:
        """Write the record and append a verdict with its raw tail, to the sandbox's own and to the common journal."""
        await self.save_quietly(sandbox)
        at, metadata = now(), verdict.to_metadata()
        entry = JournalEntry(
            at=at,
            sandbox_id=sandbox.sandbox_id,
            name=sandbox.record.name,
            workspace=sandbox.record.workspace,
            message=verdict.message,
            verdict=metadata,
            tail=tail,
        )
        self.metrics.exited(verdict)
        own, message = sandbox.sandbox_id, verdict.message
        # Each for itself: what the one file refuses is in the other at least.
        await self._verdict_written(
            sandbox,
            self._change(
                sandbox, lambda: self.store.add_exit(own, verdict=metadata, message=message, tail=tail, at=at)
            ),
        )
        await self._verdict_written(sandbox, self._on_disk(lambda: self.journal.append(entry)))

    async def _verdict_written(self, sandbox: Sandbox, write: Awaitable[None]) -> None:
        try:
            await write
        except RecordError as error:
            self.log_of(sandbox).error("verdict not written", error=error.message)

    async def remove_record(self, sandbox_id: str) -> bool:
        """Remove the folder of an id, and with it the entry if there is one; whether there was a folder.

        Raises:
            RecordError: The disk refused; the entry stays.
        """
        async with self._writes.of(sandbox_id):
            found = await self._on_disk(lambda: self.store.remove(sandbox_id))
            if (sandbox := self.table.by_id(sandbox_id)) is not None:
                self.table.discard(sandbox)  # before the next write of it has its turn
            self.table.unreadable.pop(sandbox_id, None)
        return found

    async def _change(self, sandbox: Sandbox, change: Callable[[], None]) -> None:
        """Change files of an entry that is still in the table, one change after the other."""
        async with self._writes.of(sandbox.sandbox_id):
            if self.table.holds(sandbox):
                await self._on_disk(change)

    async def _on_disk(self, change: Callable[[], Result]) -> Result:
        """Carry a change of the disk out, to its end once it has begun.

        Raises:
            RecordError: The disk refused, or there was no thread to ask it on.
        """
        try:
            return await self.disk.run(change, to_the_end=True)
        except NoWorkerError as error:
            raise RecordError(f"nothing was written: {error.message}", retryable=True) from error
