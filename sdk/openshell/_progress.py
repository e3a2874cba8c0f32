"""Whether a sandbox has come to where a caller waits for it: a function of values."""

from __future__ import annotations

from enum import StrEnum

from openshell.v1 import Sandbox, SandboxCondition, SandboxPhase


class Goal(StrEnum):
    """What a caller waits for."""

    READY = "ready"
    """Phase Ready: the agent runs and its supervisor is connected."""
    STOPPED = "stopped"
    """Phase Stopped."""
    COMPLETED = "completed"
    """The main process ended with code 0."""
    DELETED = "deleted"
    """The gateway knows the sandbox no more."""


class Progress(StrEnum):
    """Where a sandbox stands in relation to a goal."""

    REACHED = "reached"
    PENDING = "pending"
    IMPOSSIBLE = "impossible"
    """The goal cannot follow from this state without somebody acting on the sandbox."""


_REACHED = {
    Goal.READY: {SandboxPhase.READY},
    Goal.STOPPED: {SandboxPhase.STOPPED},
    Goal.COMPLETED: {SandboxPhase.COMPLETED},
    Goal.DELETED: set[SandboxPhase](),
}

_IMPOSSIBLE = {
    Goal.READY: {
        SandboxPhase.ERROR,
        SandboxPhase.DELETING,
        SandboxPhase.STOPPING,
        SandboxPhase.STOPPED,
        SandboxPhase.COMPLETED,
    },
    Goal.STOPPED: {SandboxPhase.ERROR, SandboxPhase.DELETING, SandboxPhase.COMPLETED},
    Goal.COMPLETED: {SandboxPhase.ERROR, SandboxPhase.DELETING, SandboxPhase.STOPPED},
    Goal.DELETED: set[SandboxPhase](),
}


def progress(goal: Goal, phase: SandboxPhase) -> Progress:
    """Judge a phase; one that this version does not know is pending, never final."""
    if phase in _REACHED[goal]:
        return Progress.REACHED
    return Progress.IMPOSSIBLE if phase in _IMPOSSIBLE[goal] else Progress.PENDING


def phase_of(sandbox: Sandbox) -> SandboxPhase:
    """The phase, `SandboxPhase.UNSPECIFIED` where there is no status."""
    return SandboxPhase.UNSPECIFIED if sandbox.status is None else sandbox.status.phase


def conditions_of(sandbox: Sandbox) -> list[SandboxCondition]:
    """The conditions, empty where there is no status."""
    return [] if sandbox.status is None else list(sandbox.status.conditions)


def ready_condition(sandbox: Sandbox) -> SandboxCondition | None:
    """The condition that explains the phase, or None."""
    return next((found for found in conditions_of(sandbox) if found.type == "Ready"), None)


def describe(condition: SandboxCondition) -> str:
    """A condition as people read it: ``Type: Status (Reason) - message``."""
    reason = f" ({condition.reason})" if condition.reason else ""
    message = f" - {condition.message}" if condition.message else ""
    return f"{condition.type}: {condition.status}{reason}{message}"
