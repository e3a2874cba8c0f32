"""The sandboxes of this driver in memory: one entry each, with its lock, its launch and what the engine said of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from driver_docker.concurrency import KeyedLocks
from driver_docker.engine_objects import ContainerStatus
from driver_docker.errors import (
    InvalidRequestError,
    PreconditionError,
    SandboxExistsError,
    SandboxNotFoundError,
    UnreadableRecordError,
)
from driver_docker.sandbox_record import RecordPhase

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from driver_docker.engine_objects import ContainerFacts, ContainerRow, EngineEvent
    from driver_docker.sandbox_record import SandboxRecord

_MAX_EVENTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """A look at everything that found a sandbox as it was known to be."""

    at: float
    """When it was asked for, on the event loop's clock."""
    stream: int
    """Number of the event stream that was read then: another one may have missed something."""
    heard: int
    """What had been heard of the sandbox by then."""
    status: ContainerStatus
    """How its workload was."""


@dataclass(slots=True, kw_only=True, eq=False)
class Sandbox:
    """One live entry. Its fields belong to the event loop; `turns` says who may act on it, and when."""

    record: SandboxRecord
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held for a turn; the same one as long as entries of this id follow each other."""
    launch_task: asyncio.Task[None] | None = None
    """The launch or start that is or was under way."""
    unsaved: bool = False
    """Whether the disk refused the last write of the record: it is tried again at each look."""
    cleared: bool = False
    """Whether nothing is left of a launch that failed; until then each look tries again to remove it."""
    workload: ContainerFacts | None = None
    """The last inspect of the workload container."""
    events: dict[str, list[EngineEvent]] = field(default_factory=dict)
    """The engine's events of its current containers, by container id."""
    paused: set[str] = field(default_factory=set)
    """Supervisors that somebody has paused; of a workload its facts say so."""
    intentional: set[str] = field(default_factory=set)
    """Containers that the driver itself is ending: their exits are no news."""
    judged: set[str] = field(default_factory=set)
    """Containers whose end was told already, so that it is told once."""
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when an event or a request changed something that a waiting task may care about; see `notify`."""
    run: int = 0
    """Counts the runs of the workload: what was asked about an earlier one says nothing about this one."""
    workload_ended_first: bool = False
    """Whether this run's workload is known to have ended before its supervisor though no event told it."""
    lost: bool = False
    """Whether the engine has lost both containers of this run, as it has when its machine was reset."""
    fenced: dict[str, int] = field(default_factory=dict)
    """Containers that were started again, with the event stream's number at that time: what it tells of them before
    their `start` is of their earlier run."""
    secrets: tuple[str, ...] = field(default=(), repr=False)
    """Values that must not appear in a log tail."""
    heard: int = 0
    """Counts what was told, found or done to its containers: a look that began before does not say how they are."""
    agreement: Agreement | None = None
    """The last look at everything that found its containers as they are known to be."""

    @property
    def sandbox_id(self) -> str:
        """The gateway's id."""
        return self.record.sandbox_id

    @property
    def container_ids(self) -> frozenset[str]:
        """The current workload and supervisor; anything else with this sandbox's label is of an earlier run."""
        return frozenset({self.record.workload_id, self.record.supervisor_id} - {""})

    @property
    def supervisor_is_paused(self) -> bool:
        """Whether somebody has paused its current supervisor."""
        return self.record.supervisor_id in self.paused

    def note_supervisor(self, *, paused: bool) -> bool:
        """Note whether its current supervisor is paused; whether that is another answer than before."""
        if paused == self.supervisor_is_paused:
            return False
        self.heard += 1
        if paused:
            self.paused.add(self.record.supervisor_id)
        else:
            self.paused.discard(self.record.supervisor_id)
        return True

    def agree(self, rows: Mapping[str, ContainerRow], *, at: float, stream: int, heard: int) -> None:
        """Note that a look found both containers running, or paused, as they are known to be; else nothing.

        Args:
            rows: The engine's containers by id.
            at: When the look was begun.
            stream: The event stream that was read then.
            heard: What had been heard then.
        """
        workload, supervisor = rows.get(self.record.workload_id), rows.get(self.record.supervisor_id)
        if heard != self.heard or workload is None or supervisor is None or self.workload is None:
            return
        if (
            workload.status.is_alive
            and workload.status is self.workload.status
            and supervisor.status.is_alive
            and (supervisor.status is ContainerStatus.PAUSED) == self.supervisor_is_paused
        ):
            self.agreement = Agreement(at=at, stream=stream, heard=heard, status=workload.status)

    def is_known(self, *, since: float, stream: int) -> bool:
        """Whether a look since then found it as it is known to be, and nothing was heard or found afterwards.

        Args:
            since: How old the look may be, on the event loop's clock.
            stream: The event stream that is read now.
        """
        agreement = self.agreement
        return (
            agreement is not None
            and agreement.at >= since
            and agreement.stream == stream
            and agreement.heard == self.heard
            and self.workload is not None
            and self.workload.status is agreement.status
        )

    def begin_run(self, container_id: str, *, stream: int) -> None:
        """Forget what was seen of a workload's earlier run, right before it is started again.

        Args:
            container_id: The workload container; it keeps its id over its runs.
            stream: Number of the event stream that is read now.
        """
        self.run += 1
        self.heard += 1
        self.workload_ended_first = False
        self.lost = False
        self.events.pop(container_id, None)
        self.intentional.discard(container_id)
        self.judged.discard(container_id)
        self.fenced[container_id] = stream

    def forget(self, container_id: str) -> None:
        """Drop what was remembered of a container that is gone for good; what is still told of it is of no interest."""
        self.events.pop(container_id, None)
        self.intentional.discard(container_id)
        self.judged.discard(container_id)
        self.fenced.pop(container_id, None)
        self.paused.discard(container_id)

    def is_old(self, event: EngineEvent, *, stream: int) -> bool:
        """Whether an event is of a container's earlier run. The engine tells the end of a run before the next start.

        Args:
            event: An event of one of the containers.
            stream: Number of the stream that told it; a later one than at the start cannot tell of the earlier run.
        """
        fence = self.fenced.get(event.object_id)
        if fence is None:
            return False
        if event.action == "start" or stream > fence:
            del self.fenced[event.object_id]
            return False
        return True

    def add_event(self, event: EngineEvent) -> None:
        """Remember an event of a current container and wake whoever waits."""
        self.heard += 1
        seen = self.events.setdefault(event.object_id, [])
        seen.append(event)
        del seen[:-_MAX_EVENTS]
        self.notify()

    def has_event(self, container_id: str, *actions: str) -> bool:
        """Whether one of these actions was seen of a container."""
        return any(event.action in actions for event in self.events.get(container_id, ()))

    def notify(self) -> None:
        """Wake every waiter of `moved`; each looks again and waits again."""
        self.moved.set()
        self.moved = asyncio.Event()


class SandboxTable:
    """All sandboxes by id."""

    def __init__(self) -> None:
        self._by_id: dict[str, Sandbox] = {}
        self._locks = KeyedLocks()
        self.unreadable: dict[str, str] = {}
        """Sandboxes whose record cannot be read, with the reason: they are here, but cannot be told about."""

    def lock_of(self, sandbox_id: str) -> asyncio.Lock:
        """The lock of an id, whether or not there is an entry: one and the same as long as anybody has it."""
        return self._locks.of(sandbox_id)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._by_id)

    def __iter__(self) -> Iterator[Sandbox]:
        """A stable copy, in the order of creation."""
        return iter(tuple(self._by_id.values()))

    def add(self, record: SandboxRecord) -> Sandbox:
        """Reserve an id.

        Raises:
            SandboxExistsError: It is taken, by a running, stopped or failed sandbox, or by one that cannot be read.
        """
        if why := self.unreadable.get(record.sandbox_id):
            raise SandboxExistsError(f"sandbox {record.sandbox_id} already exists: {why}")
        if record.sandbox_id in self._by_id:
            raise SandboxExistsError(f"sandbox {record.sandbox_id} already exists; delete it before creating it again")
        sandbox = Sandbox(record=record, lock=self.lock_of(record.sandbox_id))
        self._by_id[record.sandbox_id] = sandbox
        return sandbox

    def discard(self, sandbox: Sandbox) -> None:
        """Forget an entry; a newer one with the same id stays."""
        if self.holds(sandbox):
            del self._by_id[sandbox.sandbox_id]

    def holds(self, sandbox: Sandbox) -> bool:
        """Whether this very entry is still there; another one with its id is another sandbox."""
        return self._by_id.get(sandbox.sandbox_id) is sandbox

    def by_id(self, sandbox_id: str) -> Sandbox | None:
        """The entry with this id."""
        return self._by_id.get(sandbox_id)

    def find(self, *, sandbox_id: str, name: str) -> Sandbox:
        """Look up by id, and by name only where no id is given (compute-driver contract 3.9).

        Raises:
            InvalidRequestError: Neither is given.
            SandboxNotFoundError: There is none, for certain.
            UnreadableRecordError: There is one, or may be one, whose record cannot be read.
            PreconditionError: Several workspaces hold a sandbox of this name.
        """
        if sandbox_id:
            found = self._by_id.get(sandbox_id)
            if found is None:
                self._check_readable(sandbox_id, self.unreadable.get(sandbox_id))
                raise SandboxNotFoundError(f"sandbox {sandbox_id} does not exist here")
            return found
        if not name:
            raise InvalidRequestError("sandbox_id and name are both empty; give the id")
        named = [sandbox for sandbox in self._by_id.values() if sandbox.record.name == name]
        live = [sandbox for sandbox in named if sandbox.record.phase is not RecordPhase.DELETING] or named
        if not live:
            self._check_readable(f"named {name}", next(iter(self.unreadable.values()), None))
            raise SandboxNotFoundError(f"no sandbox is named {name} here")
        if len(live) > 1:
            raise PreconditionError(f"{len(live)} sandboxes are named {name}; give the id", reason="AmbiguousName")
        return live[0]

    @staticmethod
    def _check_readable(which: str, why: str | None) -> None:
        if why is not None:
            raise UnreadableRecordError(
                f"sandbox {which}: {why}; it is left as it is. Repair the file and restart the driver, or delete the "
                "sandbox by its id"
            )
