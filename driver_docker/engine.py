"""The container engine as the driver sees it: a Protocol and typed errors.

Nothing here knows which client library speaks to the engine; what is handed to and fro is in `engine_objects`.
Absent, refused, conflicting and unreachable are different types, because they mean different things to a sandbox: only
`EngineAbsentError` may ever lead to "the container is gone".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Self

from driver_docker.errors import DriverError
from openshell.status import StatusCode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Mapping

    from driver_docker.engine_objects import (
        ContainerFacts,
        ContainerRow,
        ContainerSpec,
        EngineEvent,
        EngineInfo,
        ExecResult,
        ImageFacts,
        PullProgress,
        VolumeFacts,
        VolumeSpec,
    )
    from driver_docker.image_reference import ImageReference
    from driver_docker.registry_credentials import RegistryCredentials


class EngineError(DriverError):
    """The engine answered with something unexpected, or a call to it failed in a way no narrower type fits."""

    default_reason = "EngineError"


class EngineAbsentError(EngineError):
    """The engine answered that the object does not exist (HTTP 404)."""

    default_reason = "EngineAbsent"
    default_status = StatusCode.NOT_FOUND


class EngineConflictError(EngineError):
    """The engine answered that the object is in use, already exists, or is being removed (HTTP 409)."""

    default_reason = "EngineConflict"
    default_status = StatusCode.ABORTED
    default_retryable = True


class EngineRefusedError(EngineError):
    """The engine was reached and said no (HTTP 400, 403, 500 on a start, ...); its own words are the message."""

    default_reason = "EngineRefused"
    default_status = StatusCode.FAILED_PRECONDITION


class EngineUnreachableError(EngineError):
    """The engine could not be asked at all; says nothing about any container."""

    default_reason = "EngineUnreachable"
    default_status = StatusCode.UNAVAILABLE
    default_retryable = True


class EngineTimeoutError(EngineUnreachableError):
    """The engine took the request and did not answer in time; the request may still take effect."""

    default_reason = "EngineTimeout"


class EngineIncompatibleError(EngineError):
    """No API version is spoken by both sides, or the thing behind the socket is not a Docker Engine."""

    default_reason = "EngineIncompatible"
    default_status = StatusCode.FAILED_PRECONDITION


class EventStream(Protocol):
    """A live subscription. Losing the connection raises `EngineUnreachableError`; `close` ends the iteration."""

    def __aiter__(self) -> AsyncIterator[EngineEvent]:
        """Iterate over events as they arrive."""
        ...

    async def close(self) -> None:
        """End the subscription and its connection. Idempotent."""
        ...


class Engine(Protocol):
    """What the driver asks of a container engine.

    Every method raises `EngineUnreachableError` when the engine cannot be asked, `EngineTimeoutError` when it does not
    answer in time, `EngineAbsentError` for 404, `EngineConflictError` for 409 and `EngineRefusedError` for any other
    refusal. No call is retried behind the caller's back. A call that changes something is carried to its end even
    when the awaiting task is cancelled; the cancellation is raised afterwards.
    """

    @property
    def info(self) -> EngineInfo:
        """What was learnt when the connection was opened."""
        ...

    async def ping(self) -> None:
        """Return when the engine answers."""
        ...

    async def refresh_info(self) -> EngineInfo:
        """Ask again for what may change while the engine runs, such as its devices; `info` is the same afterwards."""
        ...

    async def inspect_image(self, reference: str) -> ImageFacts:
        """Facts of an image by ID, digest or tag."""
        ...

    async def pull_image(
        self,
        reference: ImageReference,
        on_progress: Callable[[PullProgress], None],
        *,
        credentials: RegistryCredentials | None = None,
    ) -> None:
        """Pull one tag or digest, never all tags.

        An error line inside the stream raises `EngineRefusedError`, a stream that breaks off `EngineUnreachableError`.
        `on_progress` is called on the event loop. Cancelling the awaiting task ends the pull.
        """
        ...

    async def create_container(self, spec: ContainerSpec) -> str:
        """Create without starting; returns the container's id. A taken name raises `EngineConflictError`."""
        ...

    async def inspect_container(self, container: str) -> ContainerFacts:
        """Facts of a container by id or name."""
        ...

    async def list_containers(self, labels: Mapping[str, str]) -> tuple[ContainerRow, ...]:
        """All containers, running or not, that carry every one of these labels."""
        ...

    async def start_container(self, container: str) -> None:
        """Start; a container that already runs is no error. A process that cannot run raises `EngineRefusedError`."""
        ...

    async def stop_container(self, container: str, *, grace_seconds: int) -> None:
        """Terminate, then kill after the grace; one that has already ended is no error."""
        ...

    async def kill_container(self, container: str, signal: str = "SIGKILL") -> None:
        """Send one signal. A container that does not run raises `EngineConflictError`."""
        ...

    async def unpause_container(self, container: str) -> None:
        """Resume a paused container; one that is not paused raises a refusal or conflict."""
        ...

    async def remove_container(self, container: str, *, force: bool = True) -> None:
        """Remove with its anonymous volumes; `force` kills it first. Raises `EngineAbsentError` when there is none."""
        ...

    async def put_archive(self, container: str, path: str, tar: bytes) -> None:
        """Unpack an uncompressed tar below `path`, with the owners and modes of its headers."""
        ...

    async def has_path(self, container: str, path: str) -> bool:
        """Whether a path exists in a container, running or not."""
        ...

    async def link_target(self, container: str, path: str) -> str | None:
        """Where a symbolic link leads inside a container, fully followed; `None` when the path is no link.

        A path that does not exist raises `EngineAbsentError`.
        """
        ...

    async def get_archive(self, container: str, path: str, *, max_bytes: int) -> bytes:
        """The tar of `path`; one larger than `max_bytes` raises `EngineRefusedError`."""
        ...

    async def log_tail(self, container: str, *, max_lines: int) -> bytes:
        """The last lines of both streams as the engine frames them (raw for a container with a terminal).

        At most 4 MiB are read; a longer answer is cut, possibly in the middle of a frame.
        """
        ...

    async def exec_command(self, container: str, argv: tuple[str, ...], *, timeout_seconds: float) -> ExecResult:
        """Run a command in a running container and wait for it."""
        ...

    async def wait_for_line(self, container: str, line: str, *, timeout_seconds: float) -> bool:
        """Follow the standard error of a container without a terminal, from its start, until it has written a line.

        Args:
            container: The container.
            line: The whole line, without its end.
            timeout_seconds: How long to follow.

        Returns:
            False where log or time ended before.
        """
        ...

    async def create_volume(self, spec: VolumeSpec) -> VolumeFacts:
        """Create a local volume, or return the one that has this name; compare labels to tell which."""
        ...

    async def inspect_volume(self, name: str) -> VolumeFacts:
        """Facts of a volume."""
        ...

    async def list_volumes(self, labels: Mapping[str, str]) -> tuple[VolumeFacts, ...]:
        """All volumes that carry every one of these labels."""
        ...

    async def remove_volume(self, name: str) -> None:
        """Remove; one in use raises `EngineConflictError`, none raises `EngineAbsentError`."""
        ...

    async def subscribe(self, *, kind: str, actions: Collection[str], labels: Mapping[str, str]) -> EventStream:
        """Open the event stream; returns once the engine has accepted the subscription.

        Args:
            kind: What the events are about, for example `container`.
            actions: The events that are told; an engine has many more.
            labels: What the objects carry.
        """
        ...

    async def close(self) -> None:
        """End every connection and thread. Pending calls end with `EngineUnreachableError`. Idempotent."""
        ...

    async def __aenter__(self) -> Self:
        """Return the engine itself."""
        ...

    async def __aexit__(self, *exc_info: object) -> None:
        """Close."""
        ...
