"""Errors of the SDK: one root, and one class for each thing a caller can do about it."""

from __future__ import annotations

from collections.abc import Sequence

from openshell.status import StatusCode


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
