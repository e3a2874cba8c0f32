"""What the gateway knows about a sandbox: frozen records, free of protobuf, SQL and I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import IntEnum

READY = "Ready"
"""Condition type that decides the public phase."""

CONFIGURATION_READY = "ConfigurationReady"
"""Condition type for the configuration that is in force (isolation contract 4.4)."""

DESIRED_CONFIGURATION_READY = "DesiredConfigurationReady"
"""Condition type for a newer configuration that could not take its place (isolation contract 4.4)."""

WORKLOAD_IDENTITY = "WorkloadIdentity"
"""Condition type that names the resolved user and group (isolation contract 5.2)."""


class Phase(IntEnum):
    """Public phases, with their numbers on the wire (isolation contract 5.1)."""

    UNSPECIFIED = 0
    PROVISIONING = 1
    READY = 2
    ERROR = 3
    DELETING = 4
    UNKNOWN = 5
    STOPPING = 6
    STOPPED = 7
    STARTING = 8
    COMPLETED = 9


class AdmissionState(IntEnum):
    """State of a configuration admission, with its numbers on the wire (isolation contract 4.1)."""

    UNSPECIFIED = 0
    PENDING = 1
    ACCEPTED = 2
    REJECTED = 3


class PolicyState(IntEnum):
    """State of a policy revision, with its numbers on the wire (isolation contract 4.1)."""

    UNSPECIFIED = 0
    PENDING = 1
    LOADED = 2
    FAILED = 3
    SUPERSEDED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One condition of a sandbox; `status` is ``True``, ``False`` or ``Unknown``."""

    type: str
    status: str
    reason: str = ""
    message: str = ""
    transition_time: datetime | None = None

    @property
    def is_true(self) -> bool:
        """Whether the status says true, whatever its case."""
        return self.status.lower() == "true"

    @property
    def is_false(self) -> bool:
        """Whether the status says false, whatever its case."""
        return self.status.lower() == "false"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedIdentity:
    """The user and group that a driver resolved for the workload."""

    uid: int
    gid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverSnapshot:
    """What a compute driver observed of one sandbox (compute-driver contract 2.2, `DriverSandbox`)."""

    sandbox_id: str
    name: str
    has_status: bool = True
    """False when the driver sent no status: the backend state is then unknown."""
    deleting: bool = False
    conditions: tuple[Condition, ...] = ()
    instance_id: str = ""
    agent_fd: str = ""
    sandbox_fd: str = ""
    identity: ResolvedIdentity | None = None

    def condition(self, kind: str) -> Condition | None:
        """The first condition whose type is exactly `kind`."""
        return next((item for item in self.conditions if item.type == kind), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformEvent:
    """An event of the platform, carried verbatim from the driver to watchers (compute-driver contract 4.5)."""

    source: str
    type: str
    reason: str
    message: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    event_time: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigurationVersion:
    """The tuple that identifies one effective configuration; the contract calls it a generation (4.1)."""

    policy_version: int
    policy_hash: str
    config_revision: int
    provider_env_revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What the supervisor of one start said about one effective configuration."""

    instance_id: str
    state: AdmissionState
    configuration: ConfigurationVersion
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The committed identity of one launch: every credential of it carries these numbers."""

    generation: str
    session_id: str
    session_rotation: int
    auth_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Provisioning:
    """The deadlines of one provisioning attempt (isolation contract 5.5)."""

    attempt_id: str
    preparation_deadline: datetime
    configuration_change_id: str = ""
    """Names the newest committed change of the configuration; begins ``initial:`` while it is the creator's."""
    configuration_change_time: datetime | None = None
    admission_start_time: datetime | None = None
    first_rejection_time: datetime | None = None
    """When that change was first rejected."""
    deadline: datetime | None = None
    timeout_time: datetime | None = None
    cleanup_completed_time: datetime | None = None
    cleanup_error: str = ""
    finished: bool = False
    """Set once by Ready, which ends the timers for good."""

    @property
    def next_deadline(self) -> datetime | None:
        """The moment at which this attempt expires; nothing when it ended or expired already."""
        if self.finished or self.timeout_time is not None:
            return None
        return self.preparation_deadline if self.admission_start_time is None else self.deadline


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxStatus:
    """The part of a record that changes while the sandbox lives."""

    phase: Phase
    conditions: tuple[Condition, ...] = ()
    agent_pod: str = ""
    agent_fd: str = ""
    sandbox_fd: str = ""
    current_policy_version: int = 0
    main_process_instance_id: str = ""
    main_process_started_time: datetime | None = None
    exit_code: int | None = None
    exit_finalized: bool = False
    admission: Admission | None = None
    configuration_activated: bool | None = None
    config_revision: int = 1
    snapshot: DriverSnapshot | None = None
    """The driver's last observation, kept so that a session or an admission can be weighed against it."""
    deletion_time: datetime | None = None

    def condition(self, kind: str) -> Condition | None:
        """The condition of that type, if there is one."""
        return next((item for item in self.conditions if item.type == kind), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxRecord:
    """One stored sandbox. `resource_version` grows by one with every stored change and starts at one."""

    id: str
    name: str
    workspace: str
    created_at: datetime
    spec: bytes = field(repr=False)
    """The serialised `openshell.v1.SandboxSpec`; its environment may hold what a user would not want in a log."""
    launch: Launch
    status: SandboxStatus
    provisioning: Provisioning
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    resource_version: int = 0

    def with_status(self, **changes: object) -> SandboxRecord:
        """The same record with some fields of its status replaced."""
        return replace(self, status=replace(self.status, **changes))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRevision:
    """One version of a sandbox's policy."""

    sandbox_id: str
    version: int
    policy: bytes = field(repr=False)
    policy_hash: str
    state: PolicyState
    created_at: datetime
    load_error: str = ""
    loaded_at: datetime | None = None
    provenance: Mapping[str, str] = field(default_factory=dict)
