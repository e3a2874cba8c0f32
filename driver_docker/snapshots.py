"""From a record and the last inspect of its workload to the sandbox's conditions. Pure.

The table of compute-driver contract 5.11, except for a paused container, which is not terminal: the gateway takes any
`Ready=False` outside its allow-list for a final error (contract 4.3), and a pause is none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from driver_docker.engine_objects import ContainerStatus
from driver_docker.events import Condition, ConditionStatus, Snapshot
from driver_docker.sandbox_record import RecordPhase
from driver_docker.verdict import Reason

if TYPE_CHECKING:
    from datetime import datetime

    from driver_docker.engine_objects import ContainerFacts
    from driver_docker.sandbox_record import SandboxRecord

READY: Final = "Ready"
SUSPENDED: Final = "Suspended"

_BY_STATUS: Final = {
    ContainerStatus.CREATED: (ConditionStatus.FALSE, Reason.STARTING, "the workload container is being started"),
    ContainerStatus.RUNNING: (ConditionStatus.TRUE, Reason.BACKEND_READY, "workload and supervisor are running"),
    ContainerStatus.PAUSED: (ConditionStatus.UNKNOWN, Reason.CONTAINER_PAUSED, "the workload container is paused"),
    ContainerStatus.RESTARTING: (
        ConditionStatus.FALSE,
        Reason.CONTAINER_RESTARTING,
        "the engine restarts the workload container, which this driver never asks for",
    ),
    ContainerStatus.REMOVING: (ConditionStatus.FALSE, Reason.DELETING, "the workload container is being removed"),
    ContainerStatus.EXITED: (ConditionStatus.FALSE, Reason.CONTAINER_EXITED, "the workload container has ended"),
    ContainerStatus.DEAD: (ConditionStatus.FALSE, Reason.CONTAINER_DEAD, "the engine gave the workload container up"),
    ContainerStatus.UNKNOWN: (ConditionStatus.FALSE, Reason.STARTING, "the workload container's state is not known"),
}


def take_snapshot(
    record: SandboxRecord, workload: ContainerFacts | None, *, namespace: str, supervisor_paused: bool = False
) -> Snapshot:
    """The observable state of one sandbox.

    Args:
        record: What the driver decided about it.
        workload: The last inspect of its container, where there is one.
        namespace: The driver's namespace.
        supervisor_paused: Whether somebody has paused its supervisor.
    """
    # Somebody else's removal, until it is told as the failure that it is.
    removing = workload is not None and workload.status is ContainerStatus.REMOVING and record.failure is None
    return Snapshot(
        sandbox_id=record.sandbox_id,
        name=record.name,
        namespace=namespace,
        workspace=record.workspace,
        container_name=record.container_name,
        container_id=record.workload_id,
        conditions=_conditions(record, workload, supervisor_paused=supervisor_paused),
        deleting=record.phase is RecordPhase.DELETING or removing,
    )


def _conditions(
    record: SandboxRecord, workload: ContainerFacts | None, *, supervisor_paused: bool
) -> tuple[Condition, ...]:
    status, reason, message = _ready(record, workload, supervisor_paused=supervisor_paused)
    ready = Condition(
        type=READY, status=status, reason=reason, message=message, transition_time=_since(record, workload, reason)
    )
    if record.phase is not RecordPhase.STOPPED:
        return (ready,)
    suspended = Condition(
        type=SUSPENDED,
        status=ConditionStatus.TRUE,
        reason=Reason.CONTAINER_STOPPED,
        message="stopped on request; everything needed to start again is kept",
        transition_time=record.changed_at,
    )
    return (ready, suspended)


def _ready(
    record: SandboxRecord, workload: ContainerFacts | None, *, supervisor_paused: bool
) -> tuple[ConditionStatus, str, str]:
    if record.phase is RecordPhase.DELETING:
        return ConditionStatus.FALSE, Reason.DELETING, "the sandbox is being deleted"
    if record.phase is RecordPhase.STOPPED:
        return ConditionStatus.FALSE, Reason.CONTAINER_STOPPED, "the sandbox was stopped on request"
    if record.phase is RecordPhase.STOPPING:
        return ConditionStatus.UNKNOWN, Reason.CONTAINER_STOPPED, "the sandbox is being stopped on request"
    if record.phase is RecordPhase.STARTING:
        return ConditionStatus.FALSE, Reason.STARTING, "the sandbox is being started"
    if record.failure is not None:
        return ConditionStatus.FALSE, record.failure.reason, record.failure.message
    if record.phase is RecordPhase.PROVISIONING:
        return ConditionStatus.FALSE, Reason.STARTING, "the sandbox is being provisioned"
    if workload is None:
        return ConditionStatus.UNKNOWN, Reason.INSPECT_FAILED, "the workload container could not be looked at yet"
    if supervisor_paused and workload.status is ContainerStatus.RUNNING:
        return ConditionStatus.UNKNOWN, Reason.CONTAINER_PAUSED, "the supervisor container is paused"
    return _BY_STATUS[workload.status]


def _since(record: SandboxRecord, workload: ContainerFacts | None, reason: str) -> datetime:
    if record.phase is RecordPhase.ACTIVE and record.failure is not None:
        return record.failure.at
    if reason == Reason.CONTAINER_EXITED and workload is not None and workload.finished_at is not None:
        return workload.finished_at
    return record.changed_at
