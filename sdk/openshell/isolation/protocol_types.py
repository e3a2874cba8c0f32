"""The values that requests and results of the Sandbox Protocol carry (isolation contract 3.4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from openshell.isolation.errors import ConfirmError
from openshell.isolation.identity import OuterFence, WorkloadIdentity
from openshell.isolation.json_codec import I32, U32, U64


class NetworkMode(StrEnum):
    """What the policy lets workload processes reach."""

    BLOCK = "block"
    PROXY = "proxy"
    ALLOW = "allow"


class LandlockRequirement(StrEnum):
    """What happens where the kernel cannot enforce the filesystem policy."""

    BEST_EFFORT = "best_effort"
    HARD_REQUIREMENT = "hard_requirement"


class Signal(StrEnum):
    """Signals that may be sent to a workload process."""

    TERM = "term"
    KILL = "kill"
    INT = "int"
    HUP = "hup"


class RuntimeHelper(StrEnum):
    """Helpers that the runtime runs itself instead of a program of the image."""

    SFTP = "sftp"


class ProcessKind(StrEnum):
    """Whether a process is the sandbox's main process or an exec."""

    MAIN = "main"
    EXEC = "exec"


class ExitKind(StrEnum):
    """How a process ended."""

    EXITED = "exited"
    SIGNALED = "signaled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The static part of the policy, as the boundary enforces it.

    Attributes:
        version: version of the policy schema.
        read_only: paths that may be read.
        read_write: paths that may be read and written.
        include_workdir: whether the working directory is writable too.
        network: what may be reached.
        proxy_addr: address of the mediating proxy, for ``proxy``.
        landlock: whether filesystem confinement may be partial.
        run_as_user: user asked for by the policy, or none.
        run_as_group: group asked for by the policy, or none.
    """

    version: int = field(default=1, metadata=U32)
    read_only: tuple[str, ...] = ()
    read_write: tuple[str, ...] = ()
    include_workdir: bool = True
    network: NetworkMode = NetworkMode.BLOCK
    proxy_addr: str | None = None
    landlock: LandlockRequirement = LandlockRequirement.BEST_EFFORT
    run_as_user: str | None = None
    run_as_group: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSpec:
    """The main process.

    Attributes:
        program: executable; empty means the image's login shell.
        args: arguments after the program.
        workdir: working directory, or none for the workspace.
        timeout_secs: seconds after which it is ended, 0 for never.
        interactive: whether it runs on a terminal.
    """

    program: str = ""
    args: tuple[str, ...] = ()
    workdir: str | None = None
    timeout_secs: int = field(default=0, metadata=U64)
    interactive: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellCommand:
    """A command line that the image's shell interprets."""

    command: str
    login: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecSpec:
    """An additional process; exactly one of program, ``shell`` and ``runtime_helper`` says what runs."""

    program: str = ""
    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    workdir: str | None = None
    pty: bool = False
    shell: ShellCommand | None = None
    runtime_helper: RuntimeHelper | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitStatus:
    """How a process ended.

    Attributes:
        kind: exited or signaled.
        value: exit code or signal number.
    """

    kind: ExitKind
    value: int = field(metadata=I32)

    @classmethod
    def exited(cls, code: int) -> ExitStatus:
        """It returned a code."""
        return cls(kind=ExitKind.EXITED, value=code)

    @classmethod
    def signaled(cls, number: int) -> ExitStatus:
        """A signal ended it."""
        return cls(kind=ExitKind.SIGNALED, value=number)

    @property
    def exit_code(self) -> int:
        """The shell's convention: the code, or 128 plus the signal's number."""
        return self.value if self.kind is ExitKind.EXITED else 128 + self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class RetainedOutput:
    """Which output of a process is still held.

    Attributes:
        first_sequence: sequence number of the oldest retained piece.
        next_sequence: sequence number of the next piece.
        truncated: whether older output was dropped.
    """

    first_sequence: int = 0
    next_sequence: int = 0
    truncated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSnapshot:
    """A process as a newly attached supervisor finds it; ``status`` is null while it runs."""

    process_id: str
    kind: ProcessKind
    terminal: bool
    status: ExitStatus | None = None
    retained_output: RetainedOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSnapshot:
    """What the boundary already holds when a supervisor attaches."""

    generation: str
    processes: tuple[ProcessSnapshot, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EnforcedProperty:
    """A control in force and what enforces it.

    Attributes:
        enforced: must be true; a boundary that cannot enforce fails Confirm instead of saying false.
        mechanism: what enforces it, never empty.
    """

    enforced: bool = True
    mechanism: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Properties:
    """The four controls that a confirmation states."""

    filesystem_confinement: EnforcedProperty
    egress_interception: EnforcedProperty
    request_attribution: EnforcedProperty
    privilege_floor: EnforcedProperty


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmation:
    """The evidence that enforcement is in force."""

    generation: str
    identity: WorkloadIdentity
    properties: Properties
    authenticated_supervisor: bool = True
    session_id: str
    outer_fence: OuterFence
    runtime_exit_terminates_workload: bool = True
    resource_claims: Mapping[str, str]
    backend_audit: object = None

    def require(
        self,
        *,
        generation: str,
        session_id: str,
        identity: WorkloadIdentity,
        outer_fence: OuterFence,
        resource_claims: Mapping[str, str],
    ) -> None:
        """Check the evidence against what the supervisor was launched for.

        Raises:
            ConfirmError: naming the part that is missing or differs.
        """
        stated = (
            ("filesystem_confinement", self.properties.filesystem_confinement),
            ("egress_interception", self.properties.egress_interception),
            ("request_attribution", self.properties.request_attribution),
            ("privilege_floor", self.properties.privilege_floor),
        )
        for name, prop in stated:
            if not prop.enforced or not prop.mechanism.strip():
                raise ConfirmError(f"the boundary does not enforce {name}")
        if not self.authenticated_supervisor:
            raise ConfirmError("the boundary does not authenticate its supervisor")
        if not self.runtime_exit_terminates_workload:
            raise ConfirmError("the workload would outlive the boundary's runtime")
        differing = [
            name
            for name, same in (
                ("generation", self.generation == generation),
                ("session_id", self.session_id == session_id),
                ("identity", self.identity == identity),
                ("outer_fence", self.outer_fence == outer_fence),
                ("resource_claims", dict(self.resource_claims) == dict(resource_claims)),
            )
            if not same
        ]
        if differing:
            raise ConfirmError(f"the boundary confirmed another {', '.join(differing)} than it was launched with")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutableIdentity:
    """An executable file and the digest of its content."""

    path: str
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedBinary:
    """Which executable opened a connection, its ancestors and the paths on its command line."""

    TAG: ClassVar[tuple[str, str]] = ("result", "resolved")

    executable: ExecutableIdentity
    ancestors: tuple[ExecutableIdentity, ...] = ()
    cmdline_paths: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class UnresolvedBinary:
    """The executable could not be determined; the connection is denied."""

    TAG: ClassVar[tuple[str, str]] = ("result", "failed")

    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketMetadata:
    """Facts about the intercepted socket."""

    socket_cookie: int
    nonblocking: bool
    process_generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectTiming:
    """How long an intercepted connection waited, in microseconds."""

    notification_to_queue_us: int
    queue_wait_us: int
