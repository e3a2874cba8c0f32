"""The root of the driver's errors: what happened, whether a retry can help, and the status a caller sees."""

from __future__ import annotations

from typing import ClassVar

from openshell.status import StatusCode

STATUS_TEXT_LIMIT_BYTES = 1024
"""Longest status text that is sent: it travels in an HTTP/2 header (compute-driver contract 0 item 10)."""


def public_text(text: str, *, limit_bytes: int = STATUS_TEXT_LIMIT_BYTES) -> str:
    """Make a text fit for a status or a condition.

    Control characters become blanks, runs of blanks become one, and the result is cut on a character's boundary.

    Args:
        text: Any text, possibly quoting a peer.
        limit_bytes: The longest result, counted in UTF-8 bytes.

    Returns:
        A single line that is never empty.
    """
    cleaned = "".join(char if char.isprintable() else " " for char in text)
    line = " ".join(cleaned.split()).rstrip(":").rstrip() or "no further detail"
    encoded = line.encode("utf-8", "replace")
    if len(encoded) <= limit_bytes:
        return encoded.decode("utf-8")
    return encoded[: limit_bytes - 3].decode("utf-8", "ignore").rstrip() + "..."


class DriverError(Exception):
    """Root of everything the driver raises on purpose.

    Attributes:
        message: What happened, to which sandbox, why, and what to do about it.
        reason: A stable word for programs; on the wire where a condition needs one (compute-driver contract 4.4).
        retryable: Whether the same call may succeed later without anyone changing anything.
        status: The gRPC status a caller gets (compute-driver contract 5.13).
        step_reason: The reason of the step of a launch that it ended, once that is known; see `launch_steps`.
    """

    default_reason: ClassVar[str] = "Internal"
    default_status: ClassVar[StatusCode] = StatusCode.INTERNAL
    default_retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        status: StatusCode | None = None,
        retryable: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = self.default_reason if reason is None else reason
        self.status = self.default_status if status is None else status
        self.retryable = self.default_retryable if retryable is None else retryable
        self.step_reason: str | None = None

    @property
    def public_message(self) -> str:
        """The message as it may leave the process: one line, bounded, never empty."""
        return public_text(self.message)


class InvalidRequestError(DriverError):
    """The caller's input has the wrong shape or value."""

    default_reason = "InvalidArgument"
    default_status = StatusCode.INVALID_ARGUMENT


class PreconditionError(DriverError):
    """The input is well formed, but this driver, host or configuration does not offer it."""

    default_reason = "FailedPrecondition"
    default_status = StatusCode.FAILED_PRECONDITION


class SandboxExistsError(DriverError):
    """A sandbox with this id is already here."""

    default_reason = "AlreadyExists"
    default_status = StatusCode.ALREADY_EXISTS


class SandboxNotFoundError(DriverError):
    """No sandbox with this id or name is here; said only when that is certain."""

    default_reason = "NotFound"
    default_status = StatusCode.NOT_FOUND


class ProvisioningError(DriverError):
    """A step of a launch failed; `reason` is the condition's reason (compute-driver contract 4.4)."""

    default_reason = "ContainerCreateFailed"
    default_status = StatusCode.INTERNAL


class NotBuiltError(DriverError):
    """The RPC is part of the contract but not offered by this driver."""

    default_reason = "Unimplemented"
    default_status = StatusCode.UNIMPLEMENTED


class ConfigurationError(DriverError):
    """The driver's own configuration cannot be used; `serve` says so and exits.

    Attributes:
        faults: Each fault by itself, where the message names several.
    """

    default_reason = "Configuration"
    default_status = StatusCode.FAILED_PRECONDITION

    def __init__(self, message: str, *, faults: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.faults = faults


class ShuttingDownError(DriverError):
    """The driver ends, or ended before an RPC was done; the call may be made again once it is back."""

    default_reason = "ShuttingDown"
    default_status = StatusCode.UNAVAILABLE
    default_retryable = True


class RecordError(DriverError):
    """A state file could not be read or written."""

    default_reason = "BoundaryStateCreateFailed"
    default_status = StatusCode.INTERNAL


class UnreadableRecordError(RecordError):
    """A sandbox is here, but what is recorded of it cannot be read: nothing follows from that, least of all absence."""

    default_reason = "RecordUnreadable"
