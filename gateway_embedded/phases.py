"""Public phase and conditions of a sandbox: a pure function of what is stored and what was observed.

Rules: compute-driver contract 4.1 to 4.3 (backend phase, composition, guards by stored phase), isolation contract 4.4
(admission) and 5.2 (reasons and texts). Admission comes before activation: a sandbox is Ready only when its effective
configuration was accepted and its supervisor's session is connected.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from enum import Enum, auto

from gateway_embedded.sandboxes import (
    CONFIGURATION_READY,
    DESIRED_CONFIGURATION_READY,
    READY,
    WORKLOAD_IDENTITY,
    Admission,
    AdmissionState,
    Condition,
    DriverSnapshot,
    Phase,
)

TRANSIENT_REASONS = frozenset(
    {
        "reconcilererror",
        "dependenciesnotready",
        "supervisornotconnected",
        "starting",
        "containerstarting",
        "containercreated",
        "healthcheckstarting",
        "inspectfailed",
    }
)
"""Reasons of ``Ready=False`` that are not final, lower-case; every other one ends in Error (contract 4.3)."""

CONFIGURATION_PENDING_TEXT = "Waiting for effective configuration validation before workload activation"
AWAITING_REPORT_TEXT = "Waiting for an authenticated supervisor configuration report"
SESSION_CONNECTED_TEXT = "Supervisor session connected"
SESSION_MISSING_TEXT = "Backend ready; waiting for supervisor session"
SESSION_LOST_TEXT = "Supervisor session disconnected"
MAIN_PROCESS_COMPLETED_TEXT = "Canonical main process completed successfully"

ENDED = frozenset({Phase.ERROR, Phase.COMPLETED, Phase.DELETING, Phase.STOPPED})
"""Phases that no observation and no session leaves; a user's operation does."""

_STOP_EVIDENCE = frozenset({"ContainerExited", "ContainerStopped"})
_STOP_IN_PROGRESS = frozenset({"PodTerminating", "PodNotTerminated"})
_SUPERVISOR_REASONS = frozenset({"ControlSupervisorExited", "ControlSupervisorStartFailed"})


class BackendPhase(Enum):
    """What the driver's snapshot alone says (compute-driver contract 4.1)."""

    UNKNOWN = auto()
    PROVISIONING = auto()
    READY = auto()
    ERROR = auto()
    DELETING = auto()
    STOPPED = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseInputs:
    """Everything that decides a phase."""

    stored_phase: Phase
    stored_conditions: tuple[Condition, ...]
    snapshot: DriverSnapshot | None
    session_connected: bool
    """Whether the supervisor instance that is admitted, or any where none is, is connected."""
    admission: Admission | None
    now: datetime
    driver_reports_runtime_readiness: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseView:
    """A public phase with the conditions that explain it, ``Ready`` first."""

    phase: Phase
    conditions: tuple[Condition, ...]


def backend_phase(snapshot: DriverSnapshot | None) -> BackendPhase:
    """The phase that a snapshot alone supports (compute-driver contract 4.1)."""
    if snapshot is None or not snapshot.has_status:
        return BackendPhase.UNKNOWN
    if snapshot.deleting:
        return BackendPhase.DELETING
    claims_ready = any(item.type == READY and item.is_true for item in snapshot.conditions)
    if not claims_ready and any(_is(item, "suspended") and item.is_true for item in snapshot.conditions):
        return BackendPhase.STOPPED
    ready = snapshot.condition(READY)
    if ready is None:
        return BackendPhase.PROVISIONING
    if ready.is_true:
        return BackendPhase.READY
    if ready.is_false and not is_transient(ready.reason):
        return BackendPhase.ERROR
    return BackendPhase.PROVISIONING


def is_transient(reason: str) -> bool:
    """Whether ``Ready=False`` for this reason may still become Ready (compute-driver contract 4.3)."""
    return reason.lower() in TRANSIENT_REASONS


def compose(inputs: PhaseInputs) -> PhaseView:
    """The public phase and conditions that follow from `inputs`.

    Phases that a snapshot cannot leave (Error, Completed, Deleting, Stopped) keep their conditions, apart from those
    that the admission decides.
    """
    stored = inputs.stored_phase
    if stored in ENDED:
        view = PhaseView(phase=stored, conditions=inputs.stored_conditions)
    elif stored is Phase.STOPPING:
        view = _while_stopping(inputs)
    else:
        view = _from_backend(inputs)
        view = _gate_on_admission(view, inputs.admission)
        if stored is Phase.STARTING and view.phase not in (Phase.READY, Phase.ERROR):
            view = replace(view, phase=Phase.STARTING)
    return _finish(view, inputs)


def refuse(inputs: PhaseInputs, error: str) -> PhaseView:
    """What follows when the isolation backend refused this start: Error, told as a configuration that is invalid.

    The supervisor ends after its report, so the driver will call that an exited supervisor, before or after the report
    arrives. Neither order may hide why it ended.
    """
    stored = next((item for item in inputs.stored_conditions if item.type == READY), None)
    overrules = inputs.stored_phase in (Phase.PROVISIONING, Phase.READY, Phase.STARTING, Phase.UNKNOWN) or (
        inputs.stored_phase is Phase.ERROR and stored is not None and stored.reason in _SUPERVISOR_REASONS
    )
    view = PhaseView(phase=inputs.stored_phase, conditions=inputs.stored_conditions)
    if overrules:
        ready = Condition(type=READY, status="False", reason="ConfigurationInvalid", message=error)
        view = PhaseView(phase=Phase.ERROR, conditions=_with(view.conditions, ready))
    return _finish(view, inputs)


def fail(inputs: PhaseInputs, *, reason: str, message: str) -> PhaseView:
    """Error for a reason of the gateway's own, for example an expired deadline."""
    ready = Condition(type=READY, status="False", reason=reason, message=message)
    return _finish(PhaseView(phase=Phase.ERROR, conditions=_with(inputs.stored_conditions, ready)), inputs)


def main_process_ended(inputs: PhaseInputs, *, exit_code: int) -> PhaseView:
    """Completed for exit code 0, Error for any other (isolation contract 5.2, without automatic restart)."""
    if exit_code == 0:
        reason, message, phase = "MainProcessCompleted", MAIN_PROCESS_COMPLETED_TEXT, Phase.COMPLETED
    else:
        reason, phase = "MainProcessFailed", Phase.ERROR
        message = f"Canonical main process exited with status {exit_code}"
    ready = Condition(type=READY, status="False", reason=reason, message=message)
    return _finish(PhaseView(phase=phase, conditions=_with(inputs.stored_conditions, ready)), inputs)


def _from_backend(inputs: PhaseInputs) -> PhaseView:
    """Composition of backend phase and session (compute-driver contract 4.2)."""
    backend = backend_phase(inputs.snapshot)
    conditions = inputs.stored_conditions if inputs.snapshot is None else inputs.snapshot.conditions
    match backend:
        case BackendPhase.ERROR:
            return PhaseView(phase=Phase.ERROR, conditions=conditions)
        case BackendPhase.DELETING:
            return PhaseView(phase=Phase.DELETING, conditions=conditions)
        case BackendPhase.STOPPED:
            return PhaseView(phase=Phase.STOPPED, conditions=conditions)
        case BackendPhase.READY | BackendPhase.PROVISIONING | BackendPhase.UNKNOWN:
            pass
    runs_by_itself = backend is BackendPhase.READY and inputs.driver_reports_runtime_readiness
    if inputs.session_connected or runs_by_itself:
        text = SESSION_CONNECTED_TEXT if inputs.session_connected else "Driver reports the runtime as ready"
        ready = Condition(type=READY, status="True", reason="DependenciesReady", message=text)
        return PhaseView(phase=Phase.READY, conditions=_with(conditions, ready))
    if _lost_its_session(inputs):
        ready = Condition(type=READY, status="False", reason="DependenciesNotReady", message=SESSION_LOST_TEXT)
        return PhaseView(phase=Phase.PROVISIONING, conditions=_with(conditions, ready))
    if backend is BackendPhase.READY:
        ready = Condition(type=READY, status="False", reason="SupervisorNotConnected", message=SESSION_MISSING_TEXT)
        return PhaseView(phase=Phase.PROVISIONING, conditions=_with(conditions, ready))
    return PhaseView(phase=Phase.PROVISIONING, conditions=conditions)


def _lost_its_session(inputs: PhaseInputs) -> bool:
    """Whether this sandbox was Ready before and has had no session since; a later snapshot does not forget that."""
    if inputs.stored_phase is Phase.READY:
        return True
    ready = next((item for item in inputs.stored_conditions if item.type == READY), None)
    return inputs.stored_phase is Phase.PROVISIONING and ready is not None and ready.message == SESSION_LOST_TEXT


def _gate_on_admission(view: PhaseView, admission: Admission | None) -> PhaseView:
    """Hold a sandbox back until its configuration is accepted (isolation contract 4.4)."""
    if view.phase not in (Phase.READY, Phase.PROVISIONING):
        return view
    if admission is None:
        if view.phase is not Phase.READY:
            return view
        reason, message = "ConfigurationPending", AWAITING_REPORT_TEXT
    elif admission.state is AdmissionState.PENDING:
        reason, message = "ConfigurationPending", CONFIGURATION_PENDING_TEXT
    elif admission.state is AdmissionState.REJECTED:
        reason, message = "ConfigurationInvalid", admission.error
    else:
        return view
    ready = Condition(type=READY, status="False", reason=reason, message=message)
    return PhaseView(phase=Phase.PROVISIONING, conditions=_with(view.conditions, ready))


def _while_stopping(inputs: PhaseInputs) -> PhaseView:
    """A stop ends in Stopped on evidence of it, in Error only for a fault that no stop explains."""
    kept = PhaseView(phase=Phase.STOPPING, conditions=inputs.stored_conditions)
    snapshot = inputs.snapshot
    if snapshot is None:
        return kept
    falses = [item for item in snapshot.conditions if item.is_false]
    backend = backend_phase(snapshot)
    if backend is BackendPhase.STOPPED or any(item.reason in _STOP_EVIDENCE for item in falses):
        return PhaseView(phase=Phase.STOPPED, conditions=snapshot.conditions)
    if any(item.reason == "ContainerRuntimeRestart" for item in falses):
        return kept
    if any(_is(item, "suspended") and item.reason in _STOP_IN_PROGRESS for item in falses):
        return kept
    if backend is BackendPhase.ERROR:
        return PhaseView(phase=Phase.ERROR, conditions=snapshot.conditions)
    return kept


def _finish(view: PhaseView, inputs: PhaseInputs) -> PhaseView:
    """Add the conditions of admission and identity, order them, and keep the times of those that did not change."""
    conditions = _with_admission(view.conditions, inputs.admission)
    identity = None if inputs.snapshot is None else inputs.snapshot.identity
    if identity is not None:
        text = f"Resolved workload UID:GID is {identity.uid}:{identity.gid}"
        resolved = Condition(type=WORKLOAD_IDENTITY, status="True", reason="DriverResolved", message=text)
        conditions = _with(conditions, resolved)
    before = {item.type: item for item in inputs.stored_conditions}
    timed = (_timed(item, before.get(item.type), inputs.now) for item in conditions)
    return PhaseView(phase=view.phase, conditions=tuple(sorted(timed, key=lambda item: item.type != READY)))


def _with_admission(conditions: tuple[Condition, ...], admission: Admission | None) -> tuple[Condition, ...]:
    if admission is None or admission.state is AdmissionState.UNSPECIFIED:
        return conditions
    conditions = tuple(item for item in conditions if item.type != DESIRED_CONFIGURATION_READY)
    if admission.state is AdmissionState.PENDING:
        status, reason, message = "False", "ConfigurationPending", CONFIGURATION_PENDING_TEXT
    elif admission.state is AdmissionState.REJECTED:
        status, reason, message = "False", "ConfigurationInvalid", admission.error
    else:
        status, reason, message = "True", "ConfigurationAccepted", ""
        if admission.error:
            desired = Condition(
                type=DESIRED_CONFIGURATION_READY, status="False", reason="ConfigurationInvalid", message=admission.error
            )
            conditions = _with(conditions, desired)
    return _with(conditions, Condition(type=CONFIGURATION_READY, status=status, reason=reason, message=message))


def _timed(condition: Condition, before: Condition | None, now: datetime) -> Condition:
    """A transition time moves only with the status, as clients that measure waiting expect."""
    if before is not None and before.status == condition.status and before.transition_time is not None:
        return replace(condition, transition_time=before.transition_time)
    return condition if condition.transition_time is not None else replace(condition, transition_time=now)


def _with(conditions: Iterable[Condition], added: Condition) -> tuple[Condition, ...]:
    return (*(item for item in conditions if item.type != added.type), added)


def _is(condition: Condition, lower_type: str) -> bool:
    return condition.type.lower() == lower_type
