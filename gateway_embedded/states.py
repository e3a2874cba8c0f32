"""The one way to change a sandbox: read, decide, compare-and-set, tell the watchers."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import replace
from datetime import datetime
from typing import Any, TypeVar

from gateway_embedded import phases
from gateway_embedded.background import BackgroundTasks
from gateway_embedded.errors import ConflictError, SandboxNotFoundError
from gateway_embedded.events import EventHub
from gateway_embedded.phases import PhaseInputs, PhaseView
from gateway_embedded.sandboxes import DriverSnapshot, Phase, PolicyRevision, SandboxRecord
from gateway_embedded.sessions import SessionEnd, SessionRegistry
from gateway_embedded.store import SandboxStore

_MAX_ATTEMPTS = 16

_T = TypeVar("_T")

Decide = Callable[[SandboxRecord], SandboxRecord | None]
Listener = Callable[[SandboxRecord], None]


class SandboxStates:
    """Stored sandboxes together with who watches them and which supervisors are connected."""

    def __init__(
        self,
        store: SandboxStore,
        hub: EventHub,
        sessions: SessionRegistry,
        tasks: BackgroundTasks,
        *,
        clock: Callable[[], datetime],
    ) -> None:
        self.store = store
        self.hub = hub
        self.sessions = sessions
        self.clock = clock
        self.driver_reports_runtime_readiness = False
        """Whether the driver vouches for the runtime itself; known after the handshake."""
        self._tasks = tasks
        self._known: set[str] = set()
        self._listeners: list[Listener] = []

    async def load(self) -> list[SandboxRecord]:
        """Take up what an earlier process left."""
        self.hub.restore(await self.store.kept_events())
        stored = [*await self.store.all()]
        self._known.update(record.id for record in stored)
        return stored

    def listen(self, listener: Listener) -> None:
        """Have `listener` called with every stored change."""
        self._listeners.append(listener)

    def knows(self, sandbox_id: str) -> bool:
        """Whether a sandbox of that id is stored."""
        return sandbox_id in self._known

    async def find(self, workspace: str, name: str) -> SandboxRecord:
        """The sandbox of that name.

        Raises:
            SandboxNotFoundError: There is none.
        """
        record = await self.store.find(workspace, name)
        if record is None:
            raise SandboxNotFoundError(f"sandbox {name!r} does not exist in workspace {workspace!r}")
        return record

    async def add(self, record: SandboxRecord, policy: PolicyRevision | None) -> SandboxRecord:
        """Store a new sandbox."""

        async def work() -> SandboxRecord:
            stored = await self.store.insert(record, policy)
            self._known.add(stored.id)
            self._tell(stored)
            return stored

        return await self._finished(work(), name=f"add {record.id}")

    async def change(self, sandbox_id: str, decide: Decide) -> SandboxRecord:
        """Apply a decision to the newest version of a sandbox, again when someone else was faster.

        A caller that is cancelled meanwhile does not keep a stored change from its watchers.

        Args:
            sandbox_id: The sandbox.
            decide: From the stored record to the wanted one; nothing, or an equal record, leaves it as it is.

        Raises:
            SandboxNotFoundError: There is no such sandbox.
            ConflictError: The sandbox changes faster than the decision can be stored.
        """
        return await self._finished(self._change(sandbox_id, decide), name=f"change {sandbox_id}")

    async def _change(self, sandbox_id: str, decide: Decide) -> SandboxRecord:
        for _ in range(_MAX_ATTEMPTS):
            record = await self.store.get(sandbox_id)
            if record is None:
                raise SandboxNotFoundError("sandbox not found")
            wanted = decide(record)
            if wanted is None or wanted == record:
                return record
            try:
                stored = await self.store.replace(wanted)
            except ConflictError:
                continue
            self._tell(stored)
            return stored
        raise ConflictError(f"sandbox {sandbox_id} keeps changing; try again")

    async def change_if_stored(self, sandbox_id: str, decide: Decide) -> SandboxRecord | None:
        """As `change`, but a sandbox that is gone is no fault."""
        try:
            return await self.change(sandbox_id, decide)
        except SandboxNotFoundError:
            return None

    async def remove(self, sandbox_id: str) -> bool:
        """Erase a sandbox, end its supervisor's session and its watches."""

        async def work() -> bool:
            removed = await self.store.remove(sandbox_id)
            self._known.discard(sandbox_id)
            self.sessions.end(sandbox_id, SessionEnd.STOPPED)
            self.hub.publish_removal(sandbox_id)
            return removed

        return await self._finished(work(), name=f"remove {sandbox_id}")

    async def recompose(self, sandbox_id: str) -> SandboxRecord | None:
        """Weigh a sandbox again after its session or admission changed."""
        return await self.change_if_stored(sandbox_id, self.composed)

    def inputs(self, record: SandboxRecord) -> PhaseInputs:
        """Everything that decides the phase of a record now."""
        status = record.status
        session = self.sessions.get(record.id)
        # The session of an instance that another one has replaced says nothing about the configuration of that one.
        connected = session is not None and (
            status.admission is None or session.instance_id == status.admission.instance_id
        )
        return PhaseInputs(
            stored_phase=status.phase,
            stored_conditions=status.conditions,
            snapshot=status.snapshot,
            session_connected=connected,
            admission=status.admission,
            now=self.clock(),
            driver_reports_runtime_readiness=self.driver_reports_runtime_readiness,
        )

    def composed(self, record: SandboxRecord) -> SandboxRecord:
        """The record with the phase and conditions that follow from its parts."""
        return with_view(record, phases.compose(self.inputs(record)))

    def observed(self, record: SandboxRecord, snapshot: DriverSnapshot) -> SandboxRecord | None:
        """The record after a driver's observation; nothing where the phase ignores observations (contract 4.2)."""
        if record.status.phase in (Phase.ERROR, Phase.COMPLETED, Phase.DELETING):
            return None
        seen = record.with_status(
            snapshot=snapshot,
            agent_pod=snapshot.instance_id,
            agent_fd=snapshot.agent_fd,
            sandbox_fd=snapshot.sandbox_fd,
        )
        return self.composed(seen)

    async def _finished(self, work: Coroutine[Any, Any, _T], *, name: str) -> _T:
        return await self._tasks.finished(work, name=name)

    def _tell(self, record: SandboxRecord) -> None:
        if record.id not in self._known:
            return
        self.hub.publish_record(record)
        for listener in self._listeners:
            listener(record)


def with_view(record: SandboxRecord, view: PhaseView) -> SandboxRecord:
    """The record with another phase and conditions; Ready ends the provisioning attempt for good."""
    changed = record.with_status(phase=view.phase, conditions=view.conditions)
    if view.phase is Phase.READY and not record.provisioning.finished:
        changed = replace(changed, provisioning=replace(changed.provisioning, finished=True))
    return changed
