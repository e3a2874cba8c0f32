"""Why a container ended: from everything that was seen to one `Verdict`. Pure.

The engine's ``wait`` has an empty error text for every process that ran, so the number is the fact and the text is not.
`judge` tries the rows below in this order; the first that fits wins. Rows 1 to 10 need evidence that the container
ended (or never started); without it only rows 11 to 13 are left.

=== ================================================================ ========================
Row Evidence                                                         Kind
=== ================================================================ ========================
1   the driver asked for it                                          stopped
2   the workload ended first                                         followed_workload
3   it is gone or being removed, and not by the driver               removed
4   never started, a state error, or the start call failed           could_not_run
5   the OOM flag and 137                                             out_of_memory
6   137 and a KILL through the engine that was not the driver's      killed_through_engine
7   129 … 159                                                        signaled
8   the OOM flag and any other code                                  exited_after_oom
9   a code other than 0                                              exited
10  code 0, and it did start                                         ended_unasked
11  it still runs                                                    still_running
12  the engine does not answer                                       engine_unreachable
13  nothing fits                                                     unknown
=== ================================================================ ========================
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from driver_docker.engine_objects import ContainerFacts, ContainerStatus, EngineEvent
from driver_docker.tail import redact
from openshell.verdicts import Component, KilledBy, LastWords, Verdict, VerdictKind, signal_name

if TYPE_CHECKING:
    from datetime import datetime

VALIDATION_FAILED_CODE: Final = 78
"""Exit code with which a supervisor says that the workspace is unusable (compute-driver contract 5.7)."""

_SIGNAL_BASE: Final = 128
_SIGKILL: Final = 9
_RESTART_CODES: Final = frozenset({137, 143})
LOST_CODE: Final = 255
"""What the engine says of a container whose end nobody could tell it; a program may exit with it, too."""
_CANNOT_RUN_CODES: Final = frozenset({125, 126, 127, 128})

_NOT_FOUND_TEXTS: Final = ("no such file or directory", "executable file not found", "not found in $path")
_NOT_EXECUTABLE_TEXTS: Final = ("permission denied", "is a directory", "exec format error", "not executable")
_START_MARKERS: Final = ("unable to start container process:", "starting container process caused:")
_EXPLANATION: Final = re.compile(r'\("(?P<text>.*)"\)\s*\Z', re.DOTALL)


class Reason(StrEnum):
    """Reason strings of conditions, as the gateway and other clients match them (compute-driver contract 4.4)."""

    STARTING = "Starting"
    BACKEND_READY = "BackendReady"
    CONTAINER_EXITED = "ContainerExited"
    CONTAINER_RUNTIME_RESTART = "ContainerRuntimeRestart"
    CONTAINER_STOPPED = "ContainerStopped"
    CONTAINER_RESTARTING = "ContainerRestarting"
    CONTAINER_PAUSED = "ContainerPaused"
    CONTAINER_DEAD = "ContainerDead"
    DELETING = "Deleting"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    IDENTITY_RESOLUTION_FAILED = "IdentityResolutionFailed"
    BOUNDARY_STATE_CREATE_FAILED = "BoundaryStateCreateFailed"
    BOUNDARY_CHANNEL_CREATE_FAILED = "BoundaryChannelCreateFailed"
    BOUNDARY_CONFIG_WRITE_FAILED = "BoundaryConfigWriteFailed"
    SANDBOX_TOKEN_WRITE_FAILED = "SandboxTokenWriteFailed"  # noqa: S105 (a reason, not a token)
    CONTAINER_CREATE_FAILED = "ContainerCreateFailed"
    CONTAINER_START_FAILED = "ContainerStartFailed"
    OUTER_FENCE_INSPECT_FAILED = "OuterFenceInspectFailed"
    OUTER_FENCE_REJECTED = "OuterFenceRejected"
    OUTER_FENCE_VIOLATION = "OuterFenceViolation"
    RESOURCE_ADMISSION_DENIED = "ResourceAdmissionDenied"
    RESOURCE_ADMISSION_LOOKUP_FAILED = "ResourceAdmissionLookupFailed"
    CONTROL_SUPERVISOR_START_FAILED = "ControlSupervisorStartFailed"
    CONTROL_SUPERVISOR_EXITED = "ControlSupervisorExited"
    WORKSPACE_VALIDATION_FAILED = "WorkspaceValidationFailed"
    INSPECT_FAILED = "InspectFailed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitEvidence:
    """Everything that was seen of one container in its current run. Leave out what was not seen."""

    component: Component
    """Which container of the sandbox it is."""
    ready_before: bool
    """Whether this launch had reached ready: decides between a failed start and a later exit."""
    facts: ContainerFacts | None = None
    """The latest inspect; None where there is none, for whatever reason."""
    absent: bool = False
    """The engine said that the container does not exist, and the driver had not removed it."""
    engine_reachable: bool = True
    """False where the engine could not be asked."""
    stop_requested: bool = False
    """The driver stopped, killed or removed the container itself, or was asked to within the grace."""
    workload_ended_first: bool = False
    """The workload container had ended before this one."""
    lost: bool = False
    """The engine came back without either container of the sandbox, and told the end of neither."""
    start_error: str | None = None
    """The engine's text where the start call was refused. A start whose answer was lost is not a refusal."""
    events: tuple[EngineEvent, ...] = ()
    """The engine's events of this container since its start, oldest first, without the `kill` and `destroy` events that
    the driver caused itself."""
    last_words: LastWords | None = None
    """The supervisor's own words, from the container of the current generation; None where they may not be quoted."""
    generation: str = ""
    """Launch generation of the container."""


def judge(evidence: ExitEvidence) -> Verdict:
    """Say why a container ended.

    Args:
        evidence: What was seen of it.

    Returns:
        A verdict with a reason and every fact that is known, whatever the evidence.
    """
    code = _exit_code(evidence)
    kind = _kind(evidence, code)
    engine_error = ""
    if kind is VerdictKind.COULD_NOT_RUN:
        told = (evidence.facts.error if evidence.facts else "") or evidence.start_error or ""
        engine_error = redact(engine_cause(told))
        code = could_not_run_code(told, code)
    facts = evidence.facts
    has_ended = _has_ended(evidence)
    words = evidence.last_words if evidence.component is Component.SUPERVISOR and has_ended else None
    if kind in {VerdictKind.STOPPED, VerdictKind.FOLLOWED_WORKLOAD}:
        words = None
    return Verdict(
        kind=kind,
        reason=_reason(evidence, kind, code),
        component=evidence.component,
        exit_code=code if has_ended else None,
        signal=signal_of(code) if has_ended else None,
        killed_by=_killed_by(evidence, kind, code),
        started_at=facts.started_at if facts else None,
        finished_at=_finished_at(evidence) if has_ended else None,
        memory_limit_bytes=facts.memory_limit_bytes if facts else None,
        engine_error=engine_error,
        words=words.public if words else "",
        stage=words.stage if words else None,
        category=words.category if words else None,
        generation=evidence.generation,
    )


def signal_of(exit_code: int | None) -> str | None:
    """Return the name of the signal that an exit code of 129 to 159 stands for, or None."""
    return None if exit_code is None else signal_name(exit_code - _SIGNAL_BASE)


def engine_cause(text: str) -> str:
    """Cut the cause out of the engine's words about a failed start.

    What follows ``unable to start container process:`` (or the older wording of the same) is the cause; without it, the
    last two clauses are. A trailing ``unknown`` clause, which says nothing, is dropped.

    Args:
        text: The engine's error text, possibly inside a client library's.
    """
    explanation = _EXPLANATION.search(text)
    if explanation:
        text = explanation["text"]
    text = " ".join(text.split()).rstrip(" :.")
    while text.endswith(": unknown"):
        text = text.removesuffix(": unknown").rstrip(" :")
    lowered = text.lower()
    for marker in _START_MARKERS:
        cause = text[lowered.rfind(marker) + len(marker) :].strip(" :") if marker in lowered else ""
        if cause:
            return cause
    clauses = [clause for clause in text.split(": ") if clause.strip()]
    return ": ".join(clauses[-2:]).strip(" :")


def could_not_run_code(text: str, code: int | None) -> int:
    """Return 127 (not found), 126 (not executable) or another code of the class for a process that never ran.

    Runtimes and their versions disagree on the number, so a text that is clear decides; then the engine's number, where
    it is one of the class; then 128.

    Args:
        text: The engine's error text.
        code: The engine's number.
    """
    cause = engine_cause(text).lower()
    if any(known in cause for known in _NOT_FOUND_TEXTS):
        return 127
    if any(known in cause for known in _NOT_EXECUTABLE_TEXTS):
        return 126
    return code if code in _CANNOT_RUN_CODES else _SIGNAL_BASE


def _kind(evidence: ExitEvidence, code: int | None) -> VerdictKind:
    if not _has_ended(evidence):
        return _kind_without_exit(evidence)
    if evidence.stop_requested:
        return VerdictKind.STOPPED
    if evidence.workload_ended_first:
        return VerdictKind.FOLLOWED_WORKLOAD
    if _is_removed(evidence):
        return VerdictKind.REMOVED
    if _never_ran(evidence):
        return VerdictKind.COULD_NOT_RUN
    return _kind_of_exit(evidence, code)


def _kind_of_exit(evidence: ExitEvidence, code: int | None) -> VerdictKind:
    out_of_memory = _out_of_memory(evidence)
    if out_of_memory and code == _SIGNAL_BASE + _SIGKILL:
        return VerdictKind.OUT_OF_MEMORY
    if code == _SIGNAL_BASE + _SIGKILL and _foreign_signal(evidence, _SIGKILL):
        return VerdictKind.KILLED_THROUGH_ENGINE
    if signal_of(code) is not None:
        return VerdictKind.SIGNALED
    if out_of_memory and code is not None:
        return VerdictKind.EXITED_AFTER_OOM
    if code:
        return VerdictKind.EXITED
    if code == 0 and _did_start(evidence):
        return VerdictKind.ENDED_UNASKED
    return VerdictKind.UNKNOWN


def _kind_without_exit(evidence: ExitEvidence) -> VerdictKind:
    if not evidence.engine_reachable:
        return VerdictKind.ENGINE_UNREACHABLE
    if evidence.facts is not None and evidence.facts.status is not ContainerStatus.UNKNOWN:
        return VerdictKind.STILL_RUNNING
    return VerdictKind.UNKNOWN


def _has_ended(evidence: ExitEvidence) -> bool:
    if evidence.absent or _die(evidence) is not None:
        return True
    facts = evidence.facts
    if facts is None:
        return evidence.start_error is not None or (evidence.stop_requested and evidence.engine_reachable)
    if facts.status in {ContainerStatus.RUNNING, ContainerStatus.PAUSED, ContainerStatus.RESTARTING}:
        return False
    return facts.status is not ContainerStatus.UNKNOWN or facts.finished_at is not None


def _is_removed(evidence: ExitEvidence) -> bool:
    # A removal by force kills first, and the engine tells of that end before the container is gone.
    removing = evidence.facts is not None and evidence.facts.status is ContainerStatus.REMOVING
    return removing or evidence.absent or any(event.action == "destroy" for event in evidence.events)


def _never_ran(evidence: ExitEvidence) -> bool:
    facts = evidence.facts
    if facts is None:
        return evidence.start_error is not None
    # The engine clears its error when a start succeeds, so one that is there belongs to the last start.
    if facts.error or facts.status is ContainerStatus.CREATED:
        return True
    return evidence.start_error is not None and facts.started_at is None


def _did_start(evidence: ExitEvidence) -> bool:
    return _die(evidence) is not None or (evidence.facts is not None and evidence.facts.started_at is not None)


def _die(evidence: ExitEvidence) -> EngineEvent | None:
    return next((event for event in reversed(evidence.events) if event.action == "die"), None)


def _exit_code(evidence: ExitEvidence) -> int | None:
    # The record of the death comes first: a later inspect may show another run, or nothing at all.
    die = _die(evidence)
    if die is not None and die.exit_code is not None:
        return die.exit_code
    return evidence.facts.exit_code if evidence.facts else None


def _finished_at(evidence: ExitEvidence) -> datetime | None:
    if evidence.facts is not None and evidence.facts.finished_at is not None:
        return evidence.facts.finished_at
    die = _die(evidence)
    return die.time if die is not None else None


def _out_of_memory(evidence: ExitEvidence) -> bool:
    if evidence.facts is not None:
        return evidence.facts.oom_killed
    # Any process of the container may have been the victim; good enough only where there is no flag to read.
    return any(event.action == "oom" for event in evidence.events)


def _foreign_signal(evidence: ExitEvidence, number: int) -> bool:
    names = {str(number), signal_name(number), (signal_name(number) or "").removeprefix("SIG")}
    return any(
        event.action == "kill" and event.attributes.get("signal", "").strip().upper() in names
        for event in evidence.events
    )


def _killed_by(evidence: ExitEvidence, kind: VerdictKind, code: int | None) -> KilledBy | None:
    if kind is VerdictKind.STOPPED:
        return KilledBy.DRIVER
    if kind in {VerdictKind.OUT_OF_MEMORY, VerdictKind.EXITED_AFTER_OOM}:
        return KilledBy.KERNEL
    if kind is VerdictKind.KILLED_THROUGH_ENGINE:
        return KilledBy.ENGINE_CLIENT
    if kind in {VerdictKind.SIGNALED, VerdictKind.REMOVED} and code is not None and signal_of(code):
        through_engine = _foreign_signal(evidence, code - _SIGNAL_BASE)
        return KilledBy.ENGINE_CLIENT if through_engine else KilledBy.UNKNOWN
    return None


def _reason(evidence: ExitEvidence, kind: VerdictKind, code: int | None) -> Reason:
    if not _has_ended(evidence):
        # Transient on the wire (contract 4.3): a view that was lost must not end a sandbox.
        return Reason.INSPECT_FAILED
    if kind is VerdictKind.STOPPED:
        return Reason.CONTAINER_STOPPED
    if evidence.component is Component.SUPERVISOR:
        return _supervisor_reason(evidence, kind, code)
    if kind is VerdictKind.COULD_NOT_RUN:
        return Reason.CONTAINER_START_FAILED
    signaled = kind in {VerdictKind.SIGNALED, VerdictKind.KILLED_THROUGH_ENGINE} and not _out_of_memory(evidence)
    restart = (signaled and code in _RESTART_CODES) or (evidence.lost and code == LOST_CODE)
    return Reason.CONTAINER_RUNTIME_RESTART if restart else Reason.CONTAINER_EXITED


def _supervisor_reason(evidence: ExitEvidence, kind: VerdictKind, code: int | None) -> Reason:
    if kind is VerdictKind.FOLLOWED_WORKLOAD:
        return Reason.CONTAINER_EXITED
    if code == VALIDATION_FAILED_CODE:
        return Reason.WORKSPACE_VALIDATION_FAILED
    return Reason.CONTROL_SUPERVISOR_EXITED if evidence.ready_before else Reason.CONTROL_SUPERVISOR_START_FAILED
