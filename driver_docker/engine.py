"""The container engine as the driver sees it: frozen facts, a Protocol, and typed errors.

Nothing here knows which client library speaks to the engine. Absent, refused, conflicting and unreachable are different
types, because they mean different things to a sandbox: only `EngineAbsentError` may ever lead to "the container is
gone".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, Self

from driver_docker.errors import DriverError
from openshell.status import StatusCode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping
    from datetime import datetime

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


class ContainerStatus(StrEnum):
    """The engine's word for a container's state; `UNKNOWN` for a word this driver does not know."""

    CREATED = "created"
    RUNNING = "running"
    PAUSED = "paused"
    RESTARTING = "restarting"
    REMOVING = "removing"
    EXITED = "exited"
    DEAD = "dead"
    UNKNOWN = "unknown"

    @classmethod
    def _missing_(cls, value: object) -> ContainerStatus:
        return cls.UNKNOWN

    @property
    def is_alive(self) -> bool:
        """Whether processes of the container exist, running or not, or are about to exist again."""
        return self in {ContainerStatus.RUNNING, ContainerStatus.PAUSED, ContainerStatus.RESTARTING}


class HealthStatus(StrEnum):
    """The engine's health word; `NONE` when the container has no health check."""

    NONE = "none"
    STARTING = "starting"
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"

    @classmethod
    def _missing_(cls, value: object) -> HealthStatus:
        return cls.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What the engine says of itself at connect time."""

    version: str
    api_version: str
    """The version this connection negotiated, for example `1.41`."""
    operating_system: str
    architecture: str
    cdi_supported: bool = False
    """Whether the engine looks for CDI specifications at all."""
    cdi_devices: tuple[str, ...] = ()
    """Qualified names of the CDI devices it found; engines before API 1.50 tell none."""
    wsl2: bool = False
    """Whether the engine's kernel is that of WSL2."""
    selinux: bool = False
    """Whether the engine confines containers with SELinux."""
    cpu_limits: bool = True
    """Whether its kernel enforces CPU limits; an engine that cannot drops them with a warning that nobody reads."""
    memory_limits: bool = True
    """The same of memory limits."""
    pids_limits: bool = True
    """The same of limits on processes and threads."""

    @property
    def api(self) -> tuple[int, int]:
        """The negotiated version as numbers, for comparisons."""
        major, _, minor = self.api_version.partition(".")
        return int(major), int(minor)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFacts:
    """What a launch needs to know of an image."""

    image_id: str
    user: str = ""
    working_dir: str = ""
    volumes: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    architecture: str = ""
    operating_system: str = ""
    tags: tuple[str, ...] = ()
    digests: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PullProgress:
    """One line of an image pull."""

    status: str
    layer_id: str = ""
    current_bytes: int | None = None
    total_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeMount:
    """A named volume at a place in a container."""

    volume: str
    target: str
    read_only: bool = False
    copy_image_content: bool = False
    """Whether an empty volume is filled from the image at the target (the engine's copy-up)."""
    subpath: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TmpfsMount:
    """A memory file system at a place in a container, with the engine's option string."""

    target: str
    options: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthCheck:
    """A health check run by the engine; durations in milliseconds."""

    argv: tuple[str, ...]
    interval_milliseconds: int
    timeout_milliseconds: int
    retries: int
    start_period_milliseconds: int
    start_interval_milliseconds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSpec:
    """Everything that is sent to create a container. What is not named here is left at the engine's default."""

    name: str
    image: str
    """An image ID, never a tag."""
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    user: str = ""
    group_add: tuple[str, ...] = ()
    working_dir: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    network_mode: str = "none"
    volumes: tuple[VolumeMount, ...] = ()
    binds: tuple[str, ...] = ()
    """Bind mounts in the engine's `-v` form, since its mount objects cannot carry SELinux labels."""
    tmpfs: tuple[TmpfsMount, ...] = ()
    cap_drop: tuple[str, ...] = ()
    security_options: tuple[str, ...] = ()
    read_only_root: bool = False
    nano_cpus: int | None = None
    memory_bytes: int | None = None
    pids_limit: int | None = None
    dns: tuple[str, ...] = ()
    dns_search: tuple[str, ...] = ()
    extra_hosts: tuple[str, ...] = ()
    sysctls: Mapping[str, str] = field(default_factory=dict)
    cdi_devices: tuple[str, ...] = ()
    health_check: HealthCheck | None = None
    disable_image_health_check: bool = True
    """An image's own health check is switched off unless `health_check` replaces it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MountFacts:
    """One mount of a created container; memory file systems are not among them."""

    kind: str
    """`volume`, `bind`, ..."""
    name: str
    """Of a volume; empty for a bind mount."""
    source: str
    target: str
    read_only: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerFacts:
    """One inspect of one container."""

    container_id: str
    name: str
    image_id: str
    labels: Mapping[str, str]
    status: ContainerStatus
    exit_code: int | None
    """The engine's number; meaningful only when `finished_at` is set or the start failed."""
    oom_killed: bool
    error: str
    """The engine's own words about a failed start; empty for a process that ran."""
    created_at: datetime | None
    started_at: datetime | None
    """`None` when the container never started (the engine's zero time)."""
    finished_at: datetime | None
    network_mode: str
    networks: tuple[str, ...]
    health: HealthStatus
    memory_limit_bytes: int | None
    tty: bool
    volume_names: tuple[str, ...] = ()
    mounts: tuple[MountFacts, ...] = ()
    tmpfs_targets: tuple[str, ...] = ()
    """Where memory file systems are mounted."""

    @property
    def running(self) -> bool:
        """Whether processes of the container exist and may run (a paused container counts as not running)."""
        return self.status is ContainerStatus.RUNNING


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerRow:
    """One row of a list: cheap, and without exit facts."""

    container_id: str
    name: str
    image_id: str
    labels: Mapping[str, str]
    status: ContainerStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeSpec:
    """A named local volume."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeFacts:
    """One inspect of one volume."""

    name: str
    driver: str
    labels: Mapping[str, str]
    options: Mapping[str, str]
    created_at: datetime | None = None
    mountpoint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """A command run inside a container."""

    exit_code: int | None
    """`None` when the engine did not say."""
    output: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEvent:
    """One event of the engine's stream."""

    kind: str
    """`container`, `volume`, `network`, `image`, ..."""
    action: str
    """`die`, `kill`, `oom`, `destroy`, ...; what follows a colon (`exec_create: ...`) is cut off."""
    object_id: str
    attributes: Mapping[str, str]
    time: datetime
    """Since when the event is told, at the engine's own clock, in UTC."""

    @property
    def exit_code(self) -> int | None:
        """The `exitCode` of a `die` event, when it is a number."""
        text = self.attributes.get("exitCode", "")
        return int(text) if text.isdecimal() else None


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

    async def subscribe(
        self, *, kinds: tuple[str, ...], labels: Mapping[str, str], since: datetime | None = None
    ) -> EventStream:
        """Open the event stream; returns once the engine has accepted the subscription."""
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
