"""What is asked of a container engine and what it tells, as frozen specifications and facts.

No client library's type is among them. A word of the engine that this driver does not know becomes `UNKNOWN` or `NONE`;
a time is in UTC, and `None` where the engine has none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime


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
    cpus: int = 0
    """CPUs of its host, above which it refuses a limit; 0 where it does not say."""
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
