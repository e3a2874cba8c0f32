"""What watchers are told: snapshots, deletions and platform events, and the progress that clients draw. Pure.

Reasons, metadata keys and step names are those of compute-driver contract 4.5.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from driver_docker.sandbox_record import RecordPhase
from openshell.verdicts import Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from driver_docker.engine_objects import PullProgress
    from driver_docker.sandbox_record import Failure, SandboxRecord

EVENT_SOURCE: Final = "docker"
_PREFIX: Final = "openshell.progress."
_REQUESTING: Final = "requesting_sandbox"
_PULLING: Final = "pulling_image"
_STARTING: Final = "starting_sandbox"
_KIB: Final = 1024


class EventType(StrEnum):
    """Severity of a platform event."""

    NORMAL = "Normal"
    WARNING = "Warning"


class ConditionStatus(StrEnum):
    """Status of a condition."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One condition of a sandbox."""

    type: str
    status: ConditionStatus
    reason: str
    message: str
    transition_time: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The whole observable state of one sandbox."""

    sandbox_id: str
    name: str
    namespace: str
    workspace: str
    container_name: str
    container_id: str
    conditions: tuple[Condition, ...]
    deleting: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Deleted:
    """A sandbox that no longer exists; told only after its removal was seen."""

    sandbox_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformEvent:
    """Something that happened to a sandbox, for people and for programs."""

    sandbox_id: str
    type: EventType
    reason: str
    message: str
    time: datetime
    metadata: Mapping[str, str] = field(default_factory=dict)


WatchEvent = Snapshot | Deleted | PlatformEvent


def scheduled(sandbox_id: str, at: datetime, *, image: str) -> PlatformEvent:
    """The sandbox was accepted."""
    return _normal(
        sandbox_id,
        at,
        "Scheduled",
        f"Sandbox accepted; image {image}",
        complete=_REQUESTING,
        label="Sandbox allocated",
        active=_PULLING,
        detail=image,
        image_ref=image,
    )


def pulling(sandbox_id: str, at: datetime, *, image: str) -> PlatformEvent:
    """An image pull began."""
    return _normal(sandbox_id, at, "Pulling", f"Pulling image {image}", active=_PULLING, detail=image, image_ref=image)


def pulling_layer(sandbox_id: str, at: datetime, *, image: str, progress: PullProgress) -> PlatformEvent:
    """A layer moved on."""
    detail = f"{progress.status} {progress.layer_id}".strip()
    if progress.current_bytes is not None and progress.total_bytes:
        detail += f" ({byte_text(progress.current_bytes)}/{byte_text(progress.total_bytes)})"
    return _normal(
        sandbox_id,
        at,
        "PullingLayer",
        detail,
        active=_PULLING,
        detail=detail,
        image_ref=image,
        docker_status=progress.status,
        layer_id=progress.layer_id,
        plain_detail=detail,
    )


def image_present(sandbox_id: str, at: datetime, *, image: str) -> PlatformEvent:
    """The image was there already."""
    return _image_done(sandbox_id, at, "ImagePresent", "Image already present", image)


def pulled(sandbox_id: str, at: datetime, *, image: str) -> PlatformEvent:
    """The image was pulled."""
    return _image_done(sandbox_id, at, "Pulled", "Image pulled", image)


def created(sandbox_id: str, at: datetime, *, container_name: str) -> PlatformEvent:
    """The workload container exists."""
    return _normal(
        sandbox_id,
        at,
        "Created",
        f"Container {container_name} created",
        active=_STARTING,
        detail="Container created",
        container_name=container_name,
    )


def started(sandbox_id: str, at: datetime, *, container_name: str) -> PlatformEvent:
    """Both containers run and the supervisor is healthy."""
    return _normal(
        sandbox_id,
        at,
        "Started",
        f"Container {container_name} started",
        active=_STARTING,
        detail="Waiting for supervisor relay",
        container_name=container_name,
    )


def warning(
    sandbox_id: str, at: datetime, *, reason: str, message: str, metadata: Mapping[str, str] | None = None
) -> PlatformEvent:
    """A failure or another thing that an operator should know."""
    return PlatformEvent(
        sandbox_id=sandbox_id,
        type=EventType.WARNING,
        reason=reason,
        message=message,
        time=at,
        metadata=dict(metadata or {}),
    )


def exited(sandbox_id: str, at: datetime, verdict: Verdict) -> PlatformEvent:
    """A container ended: a warning where that is a failure, with the verdict as metadata."""
    return PlatformEvent(
        sandbox_id=sandbox_id,
        type=EventType.NORMAL if verdict.exit_code == 0 and not verdict.is_failure else EventType.WARNING,
        reason=verdict.reason,
        message=verdict.message,
        time=at,
        metadata=verdict.to_metadata(),
    )


def failed(record: SandboxRecord, failure: Failure) -> PlatformEvent:
    """A recorded failure as it is told: a warning, unless a sandbox that was ready has done its work."""
    verdict = Verdict.from_metadata(failure.verdict) if record.phase is RecordPhase.ACTIVE else None
    if verdict is not None:
        return exited(record.sandbox_id, failure.at, verdict)
    return warning(
        record.sandbox_id, failure.at, reason=failure.reason, message=failure.message, metadata=failure.verdict
    )


def byte_text(count: int) -> str:
    """A size as progress shows it: `B`, whole `KB` and `MB`, `GB` with one decimal; powers of 1024."""
    if count < _KIB:
        return f"{count}B"
    if count < _KIB**2:
        return f"{count // _KIB}KB"
    if count < _KIB**3:
        return f"{count // _KIB**2}MB"
    return f"{count / _KIB**3:.1f}GB"


def _image_done(sandbox_id: str, at: datetime, reason: str, label: str, image: str) -> PlatformEvent:
    return _normal(
        sandbox_id, at, reason, f"{label}: {image}", complete=_PULLING, label=label, active=_STARTING, image_ref=image
    )


def _normal(
    sandbox_id: str,
    at: datetime,
    reason: str,
    message: str,
    *,
    complete: str = "",
    label: str = "",
    active: str = "",
    detail: str = "",
    plain_detail: str = "",
    **others: str,
) -> PlatformEvent:
    progress = {
        f"{_PREFIX}complete_step": complete,
        f"{_PREFIX}complete_label": label,
        f"{_PREFIX}active_step": active,
        f"{_PREFIX}active_detail": detail,
        "detail": plain_detail,
    }
    return PlatformEvent(
        sandbox_id=sandbox_id,
        type=EventType.NORMAL,
        reason=reason,
        message=message,
        time=at,
        metadata={key: value for key, value in (progress | others).items() if value},
    )
