"""Sandboxes and verdicts as people and programs read them. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from openshell._progress import conditions_of, describe, phase_of, ready_condition

if TYPE_CHECKING:
    from openshell.v1 import Sandbox
    from openshell.verdicts import Verdict


def phase_name(sandbox: Sandbox) -> str:
    """The phase as it is shown, for example ``Ready``."""
    return str(phase_of(sandbox)).capitalize()


def age(created: datetime | None, now: datetime) -> str:
    """Time since creation in its largest unit, for example ``5m``."""
    if created is None:
        return "-"
    if created.tzinfo is None:
        created = created.replace(tzinfo=UTC)
    seconds = max(0, int((now - created).total_seconds()))
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def sandbox_lines(sandbox: Sandbox, verdict: Verdict | None) -> list[str]:
    """``openshell sandbox get``: identity, phase, conditions, and why the supervisor last ended."""
    metadata = sandbox.metadata
    lines = [
        f"Name: {metadata.name if metadata else '-'}",
        f"Workspace: {metadata.workspace if metadata else '-'}",
        f"Id: {metadata.id if metadata else '-'}",
        f"Phase: {phase_name(sandbox)}",
    ]
    if sandbox.spec is not None and sandbox.spec.template is not None and sandbox.spec.template.image:
        lines.append(f"Image: {sandbox.spec.template.image}")
    if sandbox.status is not None and sandbox.status.exit_code is not None:
        lines.append(f"Exit code: {sandbox.status.exit_code}")
    found = conditions_of(sandbox)
    if found:
        lines.append("Conditions:")
        lines += [f"  {describe(condition)}" for condition in found]
    if verdict is not None:
        lines.append("Last supervisor exit:")
        lines += [f"  {key}: {value}" for key, value in verdict_facts(verdict).items() if value is not None]
    return lines


def verdict_facts(verdict: Verdict) -> dict[str, str | int | None]:
    """A verdict as plain values, None where a fact is not known."""
    return {
        "kind": verdict.kind.value,
        "reason": verdict.reason or None,
        "exit_code": verdict.exit_code,
        "signal": verdict.signal,
        "killed_by": verdict.killed_by.value if verdict.killed_by else None,
        "finished_at": verdict.finished_at.isoformat() if verdict.finished_at else None,
        "stage": verdict.stage.value if verdict.stage else None,
        "category": verdict.category.value if verdict.category else None,
        "words": verdict.words or None,
    }


def sandbox_facts(sandbox: Sandbox, verdict: Verdict | None = None) -> dict[str, object]:
    """A sandbox for ``-o json``."""
    metadata = sandbox.metadata
    ready = ready_condition(sandbox)
    return {
        "name": metadata.name if metadata else "",
        "id": metadata.id if metadata else "",
        "workspace": metadata.workspace if metadata else "",
        "created_at": metadata.created_time.isoformat() if metadata and metadata.created_time else None,
        "labels": dict(metadata.labels) if metadata else {},
        "phase": phase_name(sandbox),
        "reason": ready.reason if ready else "",
        "message": ready.message if ready else "",
        "exit_code": sandbox.status.exit_code if sandbox.status else None,
        "conditions": [
            {
                "type": condition.type,
                "status": condition.status,
                "reason": condition.reason,
                "message": condition.message,
                "transition_time": condition.transition_time.isoformat() if condition.transition_time else None,
            }
            for condition in conditions_of(sandbox)
        ],
        "last_supervisor_exit": verdict_facts(verdict) if verdict else None,
    }
