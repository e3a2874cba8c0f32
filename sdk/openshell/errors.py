"""Errors of the SDK: one root, and one class for each thing a caller can do about it.

Three kinds, by whose turn it is: `RpcError` and its subclasses are answers of the gateway; `MalformedResponseError`
means a peer that does not speak the contract; everything else was found here, before anything was sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from openshell.status import StatusCode
from openshell.verdicts import clean_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from openshell.v1 import Sandbox
    from openshell.verdicts import Verdict

_MAX_DETAIL_BYTES = 1024


class OpenShellError(Exception):
    """Root of every error that the SDK raises.

    Attributes:
        reason: Stable upper-camel word for programs; never parse the text.
        retryable: Whether the same call may succeed later without any change.
        status: The gRPC status that fits, also for faults found before anything was sent.
    """

    reason: str = "OpenShellError"
    retryable: bool = False
    status: StatusCode = StatusCode.UNKNOWN


class UnknownReleaseError(OpenShellError, LookupError):
    """The SDK ships no descriptors of a release."""

    reason = "UnknownRelease"
    status = StatusCode.NOT_FOUND

    def __init__(self, version: str, *, known: Sequence[str]) -> None:
        """Name the release that was asked for and those that exist."""
        super().__init__(
            f"no descriptors of release {version!r} ship with this SDK; known releases: {', '.join(known)}"
        )


class InvalidArgumentError(OpenShellError, ValueError):
    """An argument cannot be sent as it is; nothing was sent."""

    reason = "InvalidArgument"
    status = StatusCode.INVALID_ARGUMENT


class ClientClosedError(OpenShellError):
    """A call on a client that was closed; nothing was sent."""

    reason = "ClientClosed"
    status = StatusCode.FAILED_PRECONDITION


class GatewayConfigurationError(OpenShellError):
    """No usable gateway is configured on this machine; the text names the file or option to change."""

    reason = "GatewayConfiguration"
    status = StatusCode.FAILED_PRECONDITION


class MalformedResponseError(OpenShellError):
    """A peer sent bytes that are not the message the contract promises."""

    reason = "MalformedResponse"
    status = StatusCode.INTERNAL

    def __init__(self, source: str, message_name: str, size_bytes: int) -> None:
        """Name the call, the message it should have been and its size; the bytes themselves may hold secrets."""
        super().__init__(f"{source} answered {size_bytes} bytes that are not a valid {message_name}")


class RpcError(OpenShellError):
    """The gateway answered a call with a status other than OK, or could not be reached.

    Attributes:
        rpc: Name of the call, for example ``CreateSandbox``.
        detail: The gateway's own words, bounded and without control characters.
    """

    reason = "RpcFailed"

    def __init__(self, rpc: str, status: StatusCode, detail: str, *, endpoint: str) -> None:
        """Say which call failed where, with which status and why."""
        self.rpc = rpc
        self.status = status
        self.detail = clean_text(detail, max_bytes=_MAX_DETAIL_BYTES) or "the gateway gave no reason"
        super().__init__(f"{rpc} at {endpoint} failed with {status.name}: {self.detail}")

    _BY_STATUS: ClassVar[dict[StatusCode, type[RpcError]]] = {}

    def __init_subclass__(cls, *, statuses: tuple[StatusCode, ...] = (), **kwargs: object) -> None:
        """Register the class for the statuses it stands for."""
        super().__init_subclass__(**kwargs)
        for status in statuses:
            RpcError._BY_STATUS[status] = cls

    @classmethod
    def from_status(cls, rpc: str, status: StatusCode, detail: str, *, endpoint: str) -> RpcError:
        """The error class for a status; `RpcError` itself where none is more precise."""
        return cls._BY_STATUS.get(status, RpcError)(rpc, status, detail, endpoint=endpoint)


class NotFoundError(RpcError, statuses=(StatusCode.NOT_FOUND,)):
    """The named object does not exist in the workspace."""

    reason = "NotFound"


class AlreadyExistsError(RpcError, statuses=(StatusCode.ALREADY_EXISTS,)):
    """An object of that name exists already."""

    reason = "AlreadyExists"


class RequestRefusedError(RpcError, statuses=(StatusCode.INVALID_ARGUMENT, StatusCode.OUT_OF_RANGE)):
    """The gateway refused the request as it stands; changing it is the only cure."""

    reason = "RequestRefused"


class FailedPreconditionError(RpcError, statuses=(StatusCode.FAILED_PRECONDITION,)):
    """The request is sound but not possible in the present state or configuration."""

    reason = "FailedPrecondition"


class PermissionDeniedError(RpcError, statuses=(StatusCode.PERMISSION_DENIED, StatusCode.UNAUTHENTICATED)):
    """The caller is not known, or may not do this."""

    reason = "PermissionDenied"


class UnimplementedError(RpcError, statuses=(StatusCode.UNIMPLEMENTED,)):
    """This gateway does not offer the call."""

    reason = "Unimplemented"


class ConflictError(RpcError, statuses=(StatusCode.ABORTED,)):
    """Somebody else changed the object meanwhile; read it again and decide anew."""

    reason = "Conflict"
    retryable = True


class ResourceExhaustedError(RpcError, statuses=(StatusCode.RESOURCE_EXHAUSTED,)):
    """A limit was reached, for example a stream that is read too slowly."""

    reason = "ResourceExhausted"
    retryable = True


class UnavailableError(RpcError, statuses=(StatusCode.UNAVAILABLE,)):
    """The gateway cannot be reached or is shutting down."""

    reason = "Unavailable"
    retryable = True


class DeadlineError(RpcError, statuses=(StatusCode.DEADLINE_EXCEEDED,)):
    """The call did not end within its time; its effect is not known."""

    reason = "DeadlineExceeded"
    retryable = True


class WaitTimeoutError(OpenShellError, TimeoutError):
    """A sandbox did not reach the awaited state in time.

    Attributes:
        sandbox: The last state that was seen, or None.
    """

    reason = "WaitTimeout"
    retryable = True
    status = StatusCode.DEADLINE_EXCEEDED

    def __init__(self, text: str, *, sandbox: Sandbox | None) -> None:
        """Keep the last state beside the text."""
        self.sandbox = sandbox
        super().__init__(text)


class SandboxFailedError(OpenShellError):
    """A sandbox reached a state from which the awaited one cannot follow.

    Attributes:
        sandbox: The state in which it ended, with its conditions.
        last_supervisor_exit: Why its supervisor ended, when that is known.
    """

    reason = "SandboxFailed"
    status = StatusCode.FAILED_PRECONDITION

    def __init__(self, text: str, *, sandbox: Sandbox, last_supervisor_exit: Verdict | None) -> None:
        """Keep the state and the verdict beside the text."""
        self.sandbox = sandbox
        self.last_supervisor_exit = last_supervisor_exit
        super().__init__(text)
