"""What is recorded of one sandbox, and its form on the disk. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_VERSION: Final = 1
ENDED: Final = "ended"
"""Shown for an active sandbox that has failed; it stays startable and is recorded as active."""


class RecordPhase(StrEnum):
    """How far a sandbox has come, as the next driver must know it."""

    PROVISIONING = "provisioning"
    STARTING = "starting"
    """Its launch input is committed, and its containers are made to run from it; the next driver goes on with that."""
    ACTIVE = "active"
    """It was ready once in this run; a failure says that it is not any more."""
    STOPPING = "stopping"
    """A stop was asked for and is not complete; the next driver completes it."""
    STOPPED = "stopped"
    FAILED = "failed"
    """Its launch failed and everything of it was removed; kept until it is deleted."""
    DELETING = "deleting"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a sandbox is not ready and will not become so by itself."""

    reason: str
    message: str
    at: datetime
    verdict: Mapping[str, str] = field(default_factory=dict)
    """The verdict's metadata, where an exit was the cause."""
    untold: bool = False
    """Whether nobody watched when its event was published; the next watch begins with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxRecord:
    """One sandbox. Holds no secret."""

    sandbox_id: str
    name: str
    workspace: str
    phase: RecordPhase
    changed_at: datetime
    """When phase or failure last changed; the transition time of its conditions."""
    generation: str = ""
    image_reference: str = ""
    image_id: str = ""
    runtime_image_id: str = ""
    """Image of the sandbox runtime that the workload container keeps; empty in records of older drivers."""
    runtime_image_reference: str = ""
    """How that image was named when the sandbox was created; its tag may be all that tells the revision."""
    isolation_backend: str = ""
    """Backend that the sandbox was admitted with; empty: the built-in one (isolation contract 2.5, the pin)."""
    container_name: str = ""
    workload_id: str = ""
    supervisor_id: str = ""
    supervisor_epoch: int = 0
    """The `auth_epoch` of the credentials that the supervisor was made with; 0 in records of older drivers."""
    was_ready: bool = False
    """Whether this generation reached ready: a later exit is an exit, not a failed start."""
    failure: Failure | None = None
    start_generation: str = ""
    """The gateway's name of the start that this run comes from; empty after a create, until a start adopts it."""
    fenced_finished_at: datetime | None = None
    """When the run before the last start ended: an end observed with this time is an old one (contract 5.9)."""

    @property
    def shown_phase(self) -> str:
        """The phase as an operator is shown it: `ended` where a sandbox that was ready has failed since."""
        return ENDED if self.phase is RecordPhase.ACTIVE and self.failure is not None else self.phase.value

    def changed(self, at: datetime, **others: Any) -> SandboxRecord:
        """A copy with other fields and a new time of change."""
        return replace(self, changed_at=at, **others)


def encode(record: SandboxRecord) -> bytes:
    """Write a record."""
    return json.dumps({"version": _VERSION, **asdict(record)}, default=_plain, indent=1).encode()


def _plain(value: object) -> str:
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    raise TypeError(type(value).__name__)


def decode(data: bytes, sandbox_id: str) -> SandboxRecord:
    """Read a record; members that a newer driver added are left out.

    Raises:
        ValueError: It is damaged, of a newer driver, or of another sandbox.
    """
    try:
        body = {} | json.loads(data)
    except (RecursionError, TypeError) as error:
        raise ValueError("it is no JSON object") from error
    if body.get("version") != _VERSION:
        raise ValueError(f"it is of version {body.get('version')!r}, and this driver knows version {_VERSION} alone")
    try:
        record = SandboxRecord(**_converted(SandboxRecord, body, _CONVERSIONS))
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"it is damaged ({error})") from error
    if record.sandbox_id != sandbox_id:
        raise ValueError(f"it is of sandbox {record.sandbox_id[:200]!r}")
    return record


def _converted(
    kind: type[SandboxRecord | Failure], body: Mapping[str, Any], conversions: Mapping[str, Callable[[Any], Any]]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in fields(kind):
        if each.name not in body:
            continue  # of an older driver, unless the member is a needed one
        value = body[each.name]
        convert = conversions.get(each.name)
        if convert is not None and not (value is None and each.default is None):
            value = convert(value)
        elif not isinstance(value, {"str": str, "bool": bool, "int": int}.get(str(each.type), object)):
            raise TypeError(f"{each.name} is no {each.type}")
        found[each.name] = value
    return found


def _failure(body: Mapping[str, Any]) -> Failure:
    return Failure(**_converted(Failure, body, {"at": datetime.fromisoformat, "verdict": _strings}))


def _strings(body: Mapping[str, Any]) -> dict[str, str]:
    return {str(key): str(value) for key, value in body.items()}


_CONVERSIONS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "phase": RecordPhase,
    "changed_at": datetime.fromisoformat,
    "fenced_finished_at": datetime.fromisoformat,
    "failure": _failure,
}
