"""Typed failures of the isolation boundary, and the kinds they travel as on the wire.

Every error carries a ``reason`` (a stable CamelCase word), whether a retry can help, and a status code. The text of
a backend error is the display text of isolation contract 2.2; the backend's own words stand alone in ``message``.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

from openshell.status import StatusCode

MAX_MESSAGE_BYTES = 1024
"""Longest message that an error carries or accepts from a peer, in UTF-8 bytes."""


class ErrorKind(StrEnum):
    """Kinds of an error result on the wire (isolation contract 3.3)."""

    INVALID = "invalid"
    DENIED = "denied"
    UNAVAILABLE = "unavailable"
    TERMINATED = "terminated"
    PROCESS = "process"


def bounded_text(text: str, *, empty: str = "no further detail") -> str:
    """The text without control characters, on one line, at most 1 KiB, never empty.

    Args:
        text: what a peer or an exception said.
        empty: what to say when nothing printable is left.
    """
    clean = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    raw = clean.encode("utf-8", "replace")
    if len(raw) > MAX_MESSAGE_BYTES:
        clean = raw[: MAX_MESSAGE_BYTES - 3].decode("utf-8", "ignore") + "..."
    return clean or empty


def cause_of(error: OSError) -> str:
    """What is known of a failure of the operating system: its words, or Python's where there is no errno.

    Python itself refuses a socket path that is too long, for one, and then sets neither ``errno`` nor ``strerror``.
    """
    return error.strerror or str(error) or type(error).__name__


class IsolationError(Exception):
    """Root of every error of this package.

    Attributes:
        reason: stable CamelCase word for programs.
        retryable: whether the same call may succeed later without a change of input.
        status: the status code that fits when the error leaves over gRPC.
        message: what happened, bounded and on one line.
    """

    reason: ClassVar[str] = "IsolationFailed"
    retryable: ClassVar[bool] = False
    status: ClassVar[StatusCode] = StatusCode.INTERNAL

    def __init__(self, message: str) -> None:
        self.message = bounded_text(message)
        super().__init__(self.message)


class DocumentError(IsolationError):
    """A document was not what the contract says; ``field`` is the path of the offending key.

    The text never quotes the value: it may be a secret.
    """

    reason = "InvalidDocument"
    status = StatusCode.INVALID_ARGUMENT

    def __init__(self, field: str, problem: str) -> None:
        self.field = bounded_text(field, empty="document")
        super().__init__(f"{self.field}: {problem}")


class FramingError(IsolationError):
    """Bytes on a stream are not a frame of the protocol, or are larger than its limit (isolation contract 3.2)."""

    reason = "InvalidFrame"
    status = StatusCode.INVALID_ARGUMENT


class TokenError(IsolationError):
    """A bearer token was refused. The text says which rule failed and never quotes the token."""

    reason = "TokenRefused"
    status = StatusCode.UNAUTHENTICATED


class NegotiationError(IsolationError):
    """The two peers do not share a protocol version or a required capability (isolation contract 3.1).

    Attributes:
        public: what does not fit, made of version numbers and capability names alone; ``message`` may hold the peer's
            own words beside it (isolation contract 7, U3.2).
    """

    reason = "IncompatibleProtocol"
    status = StatusCode.FAILED_PRECONDITION

    def __init__(self, message: str, *, public: str = "the protocol versions or capabilities do not fit") -> None:
        super().__init__(message)
        self.public = bounded_text(public)


class ConnectionRefusedByStateError(IsolationError):
    """The boundary refuses this physical connection in its present state (isolation contract 3.6)."""

    reason = "ConnectionRefused"
    status = StatusCode.FAILED_PRECONDITION


class BackendError(IsolationError):
    """One of the error categories of isolation contract 2.2.

    ``str(error)`` is the display text; ``error.message`` is the backend's own words.
    """

    display: ClassVar[str] = "isolation backend failed"
    wire_kind: ClassVar[ErrorKind] = ErrorKind.PROCESS

    def __str__(self) -> str:
        return f"{self.display}: {self.message}"

    @property
    def is_refusal(self) -> bool:
        """Whether an Attach that ended so is a refusal of the configuration: only Denied and Attach."""
        return isinstance(self, DeniedError | AttachError)

    @classmethod
    def from_wire(cls, kind: ErrorKind, message: str) -> BackendError:
        """The error that a peer's error result means (isolation contract 2.2, wire kind to variant)."""
        return _FROM_WIRE[kind](message)


class DescriptorError(BackendError):
    """A descriptor, document or request is invalid: a fault of the driver or a peer, not a refusal."""

    reason = "InvalidDescriptor"
    status = StatusCode.INVALID_ARGUMENT
    display = "descriptor error"
    wire_kind = ErrorKind.INVALID


class NotRegisteredError(BackendError):
    """No backend is registered under the admitted name."""

    reason = "BackendNotRegistered"
    status = StatusCode.NOT_FOUND
    display = "backend not registered"
    wire_kind = ErrorKind.INVALID


class DeniedError(BackendError):
    """The backend refuses; on Attach this is a refusal of the configuration."""

    reason = "AttachmentDenied"
    status = StatusCode.PERMISSION_DENIED
    display = "attachment denied"
    wire_kind = ErrorKind.DENIED


class UnavailableError(BackendError):
    """The boundary said that it cannot serve this now. A frame from the boundary: final for the request."""

    reason = "BoundaryUnavailable"
    retryable = True
    status = StatusCode.UNAVAILABLE
    display = "boundary unavailable"
    wire_kind = ErrorKind.UNAVAILABLE


class TransportLostError(UnavailableError):
    """The physical connection failed; nothing is known of the request. Only this recovers (isolation contract 3.7)."""

    reason = "BoundaryConnectionLost"


class AttachError(BackendError):
    """The backend could not establish what the policy asks for.

    The wire has no kind of its own for it; it travels as ``denied``, the only kind by which a remote backend can signal
    a refusal.
    """

    reason = "AttachmentFailed"
    status = StatusCode.FAILED_PRECONDITION
    display = "attachment failed"
    wire_kind = ErrorKind.DENIED


class ConfirmError(BackendError):
    """Enforcement could not be confirmed."""

    reason = "ConfirmationFailed"
    status = StatusCode.FAILED_PRECONDITION
    display = "confirmation failed"


class ProcessError(BackendError):
    """A process could not be started, signaled, awaited or ended."""

    reason = "ProcessFailed"
    status = StatusCode.INTERNAL
    display = "process error"


class TerminatedError(BackendError):
    """The boundary has ended or is ending; nothing more runs in it."""

    reason = "BoundaryTerminated"
    status = StatusCode.ABORTED
    display = "boundary terminated"
    wire_kind = ErrorKind.TERMINATED


_FROM_WIRE: dict[ErrorKind, type[BackendError]] = {
    ErrorKind.UNAVAILABLE: UnavailableError,
    ErrorKind.DENIED: DeniedError,
    ErrorKind.TERMINATED: TerminatedError,
    ErrorKind.INVALID: DescriptorError,
    ErrorKind.PROCESS: ProcessError,
}
