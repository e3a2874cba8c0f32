"""The root of the gateway's errors: what happened, to which sandbox, why, and the status a caller sees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from openshell.status import StatusCode

STATUS_TEXT_LIMIT_BYTES = 1024
"""Longest status text that is sent: it travels in an HTTP/2 header (compute-driver contract 0 item 10)."""

DIAGNOSTIC_LIMIT_CHARS = 512
"""Longest admission diagnostic (isolation contract 4.3)."""


def public_text(text: str, *, limit_bytes: int = STATUS_TEXT_LIMIT_BYTES) -> str:
    """Make a text fit for a status: one line, no control characters, bounded, never empty.

    Args:
        text: Any text, possibly quoting a peer.
        limit_bytes: The longest result, counted in UTF-8 bytes.
    """
    line = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    encoded = (line or "no further detail").encode("utf-8", "replace")
    if len(encoded) <= limit_bytes:
        return encoded.decode("utf-8")
    return encoded[: limit_bytes - 3].decode("utf-8", "ignore").rstrip() + "..."


class GatewayError(Exception):
    """Root of everything the gateway raises on purpose.

    Attributes:
        message: What happened, to which sandbox, why, and what to do about it.
        reason: A stable word for programs; travels as the reason of the error details.
        retryable: Whether the same call may succeed later without anyone changing anything.
        status: The gRPC status a caller gets.
        facts: Further machine-readable facts, for example the current resource version.
    """

    default_reason: ClassVar[str] = "INTERNAL"
    default_status: ClassVar[StatusCode] = StatusCode.INTERNAL
    default_retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        status: StatusCode | None = None,
        retryable: bool | None = None,
        facts: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = self.default_reason if reason is None else reason
        self.status = self.default_status if status is None else status
        self.retryable = self.default_retryable if retryable is None else retryable
        self.facts: Mapping[str, str] = {} if facts is None else dict(facts)

    @property
    def public_message(self) -> str:
        """The message as it may leave the process: one line, bounded, never empty."""
        return public_text(self.message)


class InvalidRequestError(GatewayError):
    """The caller's input has the wrong shape or value; `field` names the culprit when there is one."""

    default_reason = "INVALID_ARGUMENT"
    default_status = StatusCode.INVALID_ARGUMENT

    def __init__(self, message: str, *, field: str = "", reason: str | None = None) -> None:
        super().__init__(message, reason=reason)
        self.field = field


class NotBuiltError(GatewayError):
    """A part of the contract that this gateway does not offer."""

    default_reason = "UNIMPLEMENTED"
    default_status = StatusCode.UNIMPLEMENTED


class SandboxNotFoundError(GatewayError):
    """No sandbox of that name or id is stored."""

    default_reason = "SANDBOX_NOT_FOUND"
    default_status = StatusCode.NOT_FOUND


class WorkspaceNotFoundError(GatewayError):
    """The named workspace does not exist."""

    default_reason = "WORKSPACE_NOT_FOUND"
    default_status = StatusCode.NOT_FOUND


class SandboxExistsError(GatewayError):
    """A sandbox of that name exists in the workspace."""

    default_reason = "ALREADY_EXISTS"
    default_status = StatusCode.ALREADY_EXISTS


class DeletedMeanwhileError(GatewayError):
    """A sandbox was deleted while the operation on it was under way."""

    default_reason = "SANDBOX_DELETED"
    default_status = StatusCode.ABORTED


class PreconditionError(GatewayError):
    """The state of the sandbox, the driver or the gateway does not allow the call."""

    default_reason = "FAILED_PRECONDITION"
    default_status = StatusCode.FAILED_PRECONDITION


class ConflictError(GatewayError):
    """The state moved while the caller was deciding; read again and repeat."""

    default_reason = "RESOURCE_VERSION_CONFLICT"
    default_status = StatusCode.ABORTED
    default_retryable = True


class UnauthenticatedError(GatewayError):
    """The call needs a gateway token and carries none that is valid."""

    default_reason = "UNAUTHENTICATED"
    default_status = StatusCode.UNAUTHENTICATED


class PermissionDeniedError(GatewayError):
    """The token is valid but not for this call or this sandbox."""

    default_reason = "PERMISSION_DENIED"
    default_status = StatusCode.PERMISSION_DENIED


class CursorExpiredError(GatewayError):
    """A watch cursor lies outside what is kept; drop it and start again (public-api contract 2.2)."""

    default_reason = "CURSOR_EXPIRED"
    default_status = StatusCode.OUT_OF_RANGE


class SlowReaderError(GatewayError):
    """A watch reader fell behind; its stream ends so that it never misses a change unknowingly."""

    default_reason = "WATCH_READER_TOO_SLOW"
    default_status = StatusCode.RESOURCE_EXHAUSTED
    default_retryable = True


class UnavailableError(GatewayError):
    """The gateway or its driver cannot serve the call at this moment."""

    default_reason = "UNAVAILABLE"
    default_status = StatusCode.UNAVAILABLE
    default_retryable = True


class StoreError(GatewayError):
    """The database that holds the gateway's state did not do its work, for example because its disk is full."""

    default_reason = "STORE_UNAVAILABLE"
    default_status = StatusCode.UNAVAILABLE
    default_retryable = True


class OutcomeUncertainError(GatewayError):
    """A request with an id was begun before and its outcome is not known (public-api contract 2.2)."""

    default_reason = "REQUEST_OUTCOME_UNCERTAIN"
    default_status = StatusCode.ABORTED


class TooManyRequestsError(GatewayError):
    """A caller has as many requests with an id remembered as it may (public-api contract 2.2)."""

    default_reason = "REQUEST_ADMISSIONS_EXHAUSTED"
    default_status = StatusCode.RESOURCE_EXHAUSTED


class HandshakeError(GatewayError):
    """The compute driver behind the socket does not fit this gateway (compute-driver contract 3.1)."""

    default_reason = "DRIVER_HANDSHAKE_FAILED"
    default_status = StatusCode.FAILED_PRECONDITION


class DriverCallError(GatewayError):
    """A call to the compute driver failed; `status` is what the driver, or the transport, answered."""

    default_reason = "DRIVER_CALL_FAILED"

    def __init__(self, message: str, *, rpc: str, status: StatusCode) -> None:
        super().__init__(message, status=status, retryable=status is StatusCode.UNAVAILABLE)
        self.rpc = rpc


class DriverUnreachableError(DriverCallError):
    """Nobody could be reached on the compute driver's socket, so the driver was not asked, or did not answer."""

    default_reason = "DRIVER_UNREACHABLE"

    def __init__(self, message: str, *, rpc: str) -> None:
        super().__init__(message, rpc=rpc, status=StatusCode.UNAVAILABLE)


class ConfigurationError(GatewayError):
    """The gateway's own configuration or state folder cannot be used; `serve` says so and exits."""

    default_reason = "CONFIGURATION"
    default_status = StatusCode.FAILED_PRECONDITION
