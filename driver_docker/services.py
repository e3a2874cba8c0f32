"""What the driver's parts share: the engine, the configuration, the records, the table, and where events go."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import structlog

from driver_docker.errors import RecordError
from driver_docker.exit_journal import ExitJournal, JournalEntry
from driver_docker.metrics import Metrics
from driver_docker.snapshots import take_snapshot
from driver_docker.workers import WorkerPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from driver_docker.config import DriverConfig
    from driver_docker.engine import Engine
    from driver_docker.events import Snapshot, WatchEvent
    from driver_docker.handshake import Handshake
    from driver_docker.labels import Owner
    from driver_docker.launch_gate import LaunchGate
    from driver_docker.records import RecordStore
    from driver_docker.sandboxes import Sandbox, SandboxTable
    from openshell.verdicts import Verdict


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
    metrics: Metrics = field(default_factory=Metrics)
    engine_events: Callable[[bool], None] = lambda _connected: None
    """Told whether the engine's events are being read now, at each change."""
    event_stream: int = 0
    """Number of the engine's event stream that is read now; each reconnect gets the next."""
    log: structlog.stdlib.BoundLogger = field(default_factory=lambda: structlog.get_logger("driver"))
    disk: WorkerPool = field(default_factory=lambda: WorkerPool("records", max_threads=2))
    _writes: dict[str, asyncio.Lock] = field(default_factory=dict)

    @property
    def journal(self) -> ExitJournal:
        """The last verdicts of this namespace, those of deleted sandboxes included."""
        return ExitJournal(self.store.directory)

    def log_of(self, sandbox: Sandbox) -> structlog.stdlib.BoundLogger:
        """The log with the sandbox's id and generation."""
        return self.log.bind(sandbox_id=sandbox.sandbox_id, generation=sandbox.record.generation)

    def snapshot(self, sandbox: Sandbox) -> Snapshot:
        """The observable state of a sandbox now."""
        return take_snapshot(sandbox.record, sandbox.workload, namespace=self.owner.namespace)

    def publish_snapshot(self, sandbox: Sandbox) -> None:
        """Tell watchers the state of a sandbox."""
        self.publish(self.snapshot(sandbox))

    async def save(self, sandbox: Sandbox) -> None:
        """Write the record as it is when its turn comes: a later save never loses to an earlier one.

        Raises:
            RecordError: The disk refused.
        """
        async with self._writes.setdefault(sandbox.sandbox_id, asyncio.Lock()):
            record = sandbox.record
            await self.disk.run(lambda: self.store.save(record), to_the_end=True)

    async def save_quietly(self, sandbox: Sandbox) -> None:
        """Write the record; a disk that refuses is logged, because what is recorded has happened all the same."""
        try:
            await self.save(sandbox)
        except RecordError as error:
            self.log_of(sandbox).error("record not written", error=error.message)

    async def save_files(self, sandbox: Sandbox, files: Mapping[str, bytes]) -> None:
        """Write launch files of a sandbox.

        Raises:
            RecordError: The disk refused.
        """
        await self.disk.run(lambda: self.store.save_files(sandbox.sandbox_id, files), to_the_end=True)

    async def commit_files(self, sandbox: Sandbox, files: Mapping[str, bytes], *, last: str) -> None:
        """Replace a set of launch files that count together.

        Raises:
            RecordError: The disk refused; the set does not count.
        """
        await self.disk.run(lambda: self.store.commit_files(sandbox.sandbox_id, files, last=last), to_the_end=True)

    async def remove_files(self, sandbox: Sandbox, names: Iterable[str]) -> None:
        """Remove launch files; a disk that refuses is logged.

        They go again with the whole folder.
        """
        try:
            await self.disk.run(lambda: self.store.remove_files(sandbox.sandbox_id, names), to_the_end=True)
        except RecordError as error:
            self.log_of(sandbox).error("launch files not removed", error=error.message)

    async def record_exit(self, sandbox: Sandbox, verdict: Verdict, tail: str) -> None:
        """Write the record and append a verdict with its raw tail, to the sandbox's own and to the common journal."""
        await self.save_quietly(sandbox)
        record, at, metadata = sandbox.record, now(), verdict.to_metadata()
        self.metrics.exited(verdict)

        def write() -> None:
            self.store.add_exit(sandbox.sandbox_id, verdict=metadata, message=verdict.message, tail=tail, at=at)
            self.journal.append(
                JournalEntry(
                    at=at,
                    sandbox_id=record.sandbox_id,
                    name=record.name,
                    workspace=record.workspace,
                    message=verdict.message,
                    verdict=metadata,
                    tail=tail,
                )
            )

        try:
            await self.disk.run(write, to_the_end=True)
        except RecordError as error:
            self.log_of(sandbox).error("verdict not written", error=error.message)

    async def remove_record(self, sandbox_id: str) -> bool:
        """Remove a sandbox's folder; whether there was one.

        Raises:
            RecordError: The disk refused.
        """
        async with self._writes.setdefault(sandbox_id, asyncio.Lock()):
            found = await self.disk.run(lambda: self.store.remove(sandbox_id), to_the_end=True)
        self._writes.pop(sandbox_id, None)
        return found
