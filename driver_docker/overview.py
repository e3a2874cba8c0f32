"""`sandboxes`: what the records and the engine say of every sandbox, beside a running driver or without one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from driver_docker import labels
from driver_docker.engine import EngineAbsentError
from driver_docker.engine_objects import ContainerStatus
from driver_docker.events import ConditionStatus
from driver_docker.sandbox_record import RecordPhase
from driver_docker.snapshots import READY, take_snapshot
from driver_docker.verdict import Reason

if TYPE_CHECKING:
    from driver_docker.engine import Engine
    from driver_docker.engine_objects import ContainerFacts
    from driver_docker.events import Condition
    from driver_docker.records import RecordStore, UnreadableRecord
    from driver_docker.sandbox_record import SandboxRecord

UNKNOWN = "unknown"
GONE = "gone"
NONE = "-"
_ALIVE = frozenset({UNKNOWN, *(status.value for status in ContainerStatus if status.is_alive)})


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxView:
    """One sandbox."""

    record: SandboxRecord
    ready: Condition
    workload: str
    """State of the workload container; `gone`, `unknown` without an engine, `-` where there is none."""
    supervisor: str

    def to_json(self) -> dict[str, object]:
        """As `sandboxes -o json` prints it."""
        record = self.record
        return {
            "sandbox_id": record.sandbox_id,
            "name": record.name,
            "workspace": record.workspace,
            "phase": record.shown_phase,
            "generation": record.generation,
            "ready": self.ready.status.value,
            "reason": self.ready.reason,
            "message": self.ready.message,
            "since": self.ready.transition_time.isoformat(),
            "image": record.image_reference,
            "container_name": record.container_name,
            "workload": {"id": record.workload_id, "state": self.workload},
            "supervisor": {"id": record.supervisor_id, "state": self.supervisor},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """All sandboxes of a namespace."""

    views: tuple[SandboxView, ...] = ()
    unreadable: tuple[UnreadableRecord, ...] = ()
    """Those of which nothing else is known."""


async def look(store: RecordStore, namespace: str, engine: Engine | None) -> Overview:
    """Every recorded sandbox. Changes nothing.

    Args:
        store: The namespace's records.
        namespace: The driver's namespace.
        engine: The engine, where it answers.

    Raises:
        RecordError: The state folder cannot be read.
        EngineUnreachableError: The engine does not answer any more.
    """
    stored = await asyncio.to_thread(store.load)
    if not stored.records:
        return Overview(unreadable=stored.unreadable)
    states: dict[str, str] | None = None
    name = await asyncio.to_thread(store.driver_name)
    if engine is not None and name is not None:
        rows = await engine.list_containers(labels.owner_labels(labels.Owner(namespace=namespace, driver=name)))
        states = {row.container_id: row.status.value for row in rows}
    views = [await _view(record, namespace, engine, states) for record in stored.records]
    return Overview(views=tuple(views), unreadable=stored.unreadable)


async def _view(
    record: SandboxRecord, namespace: str, engine: Engine | None, states: dict[str, str] | None
) -> SandboxView:
    workload: ContainerFacts | None = None
    if engine is not None and record.workload_id and record.phase in {RecordPhase.ACTIVE, RecordPhase.STOPPED}:
        try:
            workload = await engine.inspect_container(record.workload_id)
        except EngineAbsentError:
            workload = None
    supervisor = _state(record.supervisor_id, states)
    paused = supervisor == ContainerStatus.PAUSED
    snapshot = take_snapshot(record, workload, namespace=namespace, supervisor_paused=paused)
    ready = next(condition for condition in snapshot.conditions if condition.type == READY)
    if workload is None and states is not None and ready.reason == Reason.INSPECT_FAILED:
        ready = replace(ready, message="the workload container is gone, and no driver has said why yet")
    if ready.status is ConditionStatus.TRUE and supervisor not in _ALIVE:
        ready = replace(
            ready,
            status=ConditionStatus.UNKNOWN,
            reason=Reason.CONTROL_SUPERVISOR_EXITED,
            message="the supervisor is not running, and no driver has said why yet",
        )
    return SandboxView(
        record=record,
        ready=ready,
        workload=_state(record.workload_id, states),
        supervisor=supervisor,
    )


def _state(container: str, states: dict[str, str] | None) -> str:
    if not container:
        return NONE
    return UNKNOWN if states is None else states.get(container, GONE)
