"""Every result of the Sandbox Protocol (isolation contract 3.4), written as ``{"result": ..., fields}``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from openshell.isolation.errors import BackendError, DocumentError, ErrorKind, bounded_text
from openshell.isolation.json_codec import decode_tagged, encode_object
from openshell.isolation.json_fields import JsonObject
from openshell.isolation.protocol_types import (
    Confirmation,
    ConnectTiming,
    ExitStatus,
    ResolvedBinary,
    SessionSnapshot,
    SocketMetadata,
    UnresolvedBinary,
)


class Result:
    """Base of every result."""

    __slots__ = ()

    TAG: ClassVar[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePolicy(Result):
    """The image's policy.

    Attributes:
        yaml: its text, or none when the image ships no policy.
        invalid: whether there is one that cannot be used.
    """

    TAG: ClassVar[tuple[str, str]] = ("result", "image_policy")

    yaml: str | None = None
    invalid: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached(Result):
    """The boundary is bound; the snapshot tells what already runs."""

    TAG: ClassVar[tuple[str, str]] = ("result", "attached")

    snapshot: SessionSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmed(Result):
    """Enforcement is in force."""

    TAG: ClassVar[tuple[str, str]] = ("result", "confirmed")

    confirmation: Confirmation


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderFilesSupported(Result):
    """Provider files can be delivered."""

    TAG: ClassVar[tuple[str, str]] = ("result", "provider_files_supported")


@dataclass(frozen=True, slots=True, kw_only=True)
class Started(Result):
    """The main process runs."""

    TAG: ClassVar[tuple[str, str]] = ("result", "started")

    process_id: str
    provider_env_revision: int = 0
    provider_env_generation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderEnvironmentUpdated(Result):
    """The provider environment as it stands now."""

    TAG: ClassVar[tuple[str, str]] = ("result", "provider_environment_updated")

    revision: int
    generation: int
    applied: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessAttached(Result):
    """Process I/O frames follow."""

    TAG: ClassVar[tuple[str, str]] = ("result", "process_attached")

    terminal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited(Result):
    """The process ended."""

    TAG: ClassVar[tuple[str, str]] = ("result", "exited")

    status: ExitStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Signaled(Result):
    """The signal was sent."""

    TAG: ClassVar[tuple[str, str]] = ("result", "signaled")


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminated(Result):
    """The process was ended."""

    TAG: ClassVar[tuple[str, str]] = ("result", "terminated")


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryTerminated(Result):
    """Nothing runs in the boundary any more."""

    TAG: ClassVar[tuple[str, str]] = ("result", "boundary_terminated")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecStarted(Result):
    """The exec runs; process I/O frames follow."""

    TAG: ClassVar[tuple[str, str]] = ("result", "exec_started")

    process_id: str
    pty: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Resized(Result):
    """The terminal has its new size."""

    TAG: ClassVar[tuple[str, str]] = ("result", "resized")


@dataclass(frozen=True, slots=True, kw_only=True)
class PortConnected(Result):
    """Raw bytes of the connection follow."""

    TAG: ClassVar[tuple[str, str]] = ("result", "port_connected")


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkConnected(Result):
    """An intercepted connection waits for its decision.

    Attributes:
        identity: which executable opened it.
        destination: ``host:port`` that it asked for.
        socket: facts about the socket.
        policy_generation: generation of the policy that it was intercepted under.
        timing: how long it waited so far.
    """

    TAG: ClassVar[tuple[str, str]] = ("result", "network_connected")

    identity: ResolvedBinary | UnresolvedBinary
    destination: str
    socket: SocketMetadata
    policy_generation: int
    timing: ConnectTiming


@dataclass(frozen=True, slots=True, kw_only=True)
class MediationReady(Result):
    """DNS frames follow."""

    TAG: ClassVar[tuple[str, str]] = ("result", "mediation_ready")


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorResult(Result):
    """The request failed; the message carries no secret."""

    TAG: ClassVar[tuple[str, str]] = ("result", "error")

    kind: ErrorKind
    message: str = field(default="")

    @classmethod
    def of(cls, error: BackendError) -> ErrorResult:
        """The wire form of an error (isolation contract 2.2)."""
        return cls(kind=error.wire_kind, message=error.message)

    def to_error(self) -> BackendError:
        """The error that it means, its message bounded and cleaned."""
        return BackendError.from_wire(self.kind, bounded_text(self.message))


RESULTS: Mapping[str, type[Result]] = {
    cls.TAG[1]: cls
    for cls in (
        ImagePolicy,
        Attached,
        Confirmed,
        ProviderFilesSupported,
        Started,
        ProviderEnvironmentUpdated,
        ProcessAttached,
        Exited,
        Signaled,
        Terminated,
        BoundaryTerminated,
        ExecStarted,
        Resized,
        PortConnected,
        NetworkConnected,
        MediationReady,
        ErrorResult,
    )
}


def result_to_object(result: Result) -> JsonObject:
    """The JSON object of a result."""
    return encode_object(result)


def result_from_object(value: object) -> Result:
    """Read a result; members that a newer peer added are ignored.

    Raises:
        DocumentError: the result is unknown or a member is wrong.
    """
    try:
        return decode_tagged(RESULTS, "result", value, "response", strict=False)
    except TypeError as error:
        raise DocumentError("response", "does not fit its type") from error
