"""Every request of the Sandbox Protocol (isolation contract 3.4); results and values are re-exported here.

A request writes ``{"operation": ..., fields}``; nothing is left out, nulls included, because the payload digest covers
the object as transmitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from openshell.isolation.json_codec import PORT, U16, decode_tagged, encode_object
from openshell.isolation.json_fields import JsonObject
from openshell.isolation.protocol_types import (
    AgentSpec,
    Confirmation,
    ConnectTiming,
    EnforcedProperty,
    ExecSpec,
    ExecutableIdentity,
    ExitKind,
    ExitStatus,
    LandlockRequirement,
    NetworkMode,
    Policy,
    ProcessKind,
    ProcessSnapshot,
    Properties,
    ResolvedBinary,
    RetainedOutput,
    RuntimeHelper,
    SessionSnapshot,
    ShellCommand,
    Signal,
    SocketMetadata,
    UnresolvedBinary,
)
from openshell.isolation.results import (
    Attached,
    BoundaryTerminated,
    Confirmed,
    ErrorResult,
    ExecStarted,
    Exited,
    ImagePolicy,
    MediationReady,
    NetworkConnected,
    PortConnected,
    ProcessAttached,
    ProviderEnvironmentUpdated,
    ProviderFilesSupported,
    Resized,
    Result,
    Signaled,
    Started,
    Terminated,
    result_from_object,
    result_to_object,
)


class Request:
    """Base of every request."""

    __slots__ = ()

    TAG: ClassVar[tuple[str, str]]
    replayable: ClassVar[bool] = False
    """Whether the same request id answers the stored result (isolation contract 3.3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoverPolicy(Request):
    """Read the policy that the image ships, if any. Answered by :class:`ImagePolicy`."""

    TAG: ClassVar[tuple[str, str]] = ("operation", "discover_policy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attach(Request):
    """Bind the boundary to one supervisor instance and its policy. Answered by :class:`Attached`."""

    TAG: ClassVar[tuple[str, str]] = ("operation", "attach")
    replayable: ClassVar[bool] = True

    supervisor_instance_id: str
    policy: Policy
    resource_claims: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirm(Request):
    """Ask for the evidence that enforcement is in force. Answered by :class:`Confirmed`."""

    TAG: ClassVar[tuple[str, str]] = ("operation", "confirm")
    replayable: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeProviderFiles(Request):
    """Ask whether provider files are supported. Answered by :class:`ProviderFilesSupported`."""

    TAG: ClassVar[tuple[str, str]] = ("operation", "probe_provider_files")


@dataclass(frozen=True, slots=True, kw_only=True)
class StartAgent(Request):
    """Start the main process: the only request that makes untrusted code run. Answered by :class:`Started`."""

    TAG: ClassVar[tuple[str, str]] = ("operation", "start_agent")
    replayable: ClassVar[bool] = True

    sandbox_id: str
    spec: AgentSpec
    policy: Policy
    ca_cert: bytes | None = field(default=None, repr=False)
    ca_bundle: bytes | None = field(default=None, repr=False)
    provider_env_revision: int = 0
    provider_env: Mapping[str, str] = field(default_factory=dict, repr=False)
    provider_files: Mapping[str, bytes] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateProviderEnvironment(Request):
    """Replace the provider environment. Answered by :class:`ProviderEnvironmentUpdated`."""

    TAG: ClassVar[tuple[str, str]] = ("operation", "update_provider_environment")
    replayable: ClassVar[bool] = True

    generation: int
    revision: int
    provider_env: Mapping[str, str] = field(default_factory=dict, repr=False)
    provider_files: Mapping[str, bytes] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachProcess(Request):
    """Attach to a process's input and output. Answered by :class:`ProcessAttached`, then process I/O frames."""

    TAG: ClassVar[tuple[str, str]] = ("operation", "attach_process")

    process_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait(Request):
    """Wait for a process to end. Answered by :class:`Exited`, however long it takes."""

    TAG: ClassVar[tuple[str, str]] = ("operation", "wait")

    process_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalProcess(Request):
    """Signal the main process. Answered by :class:`Signaled`."""

    TAG: ClassVar[tuple[str, str]] = ("operation", "signal")
    replayable: ClassVar[bool] = True

    process_id: str
    signal: Signal


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminate(Request):
    """End the main process. Answered by :class:`Terminated`."""

    TAG: ClassVar[tuple[str, str]] = ("operation", "terminate")
    replayable: ClassVar[bool] = True

    process_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminateBoundary(Request):
    """End every process and the boundary itself. Answered by :class:`BoundaryTerminated`."""

    TAG: ClassVar[tuple[str, str]] = ("operation", "terminate_boundary")
    replayable: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Exec(Request):
    """Run an additional process. Answered by :class:`ExecStarted`, then process I/O frames."""

    TAG: ClassVar[tuple[str, str]] = ("operation", "exec")
    replayable: ClassVar[bool] = True

    spec: ExecSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecSignal(Request):
    """Signal an exec. Answered by :class:`Signaled`."""

    TAG: ClassVar[tuple[str, str]] = ("operation", "exec_signal")
    replayable: ClassVar[bool] = True

    process_id: str
    signal: Signal


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize(Request):
    """Change a terminal's size. Answered by :class:`Resized`."""

    TAG: ClassVar[tuple[str, str]] = ("operation", "resize")
    replayable: ClassVar[bool] = True

    process_id: str
    cols: int = field(metadata=U16)
    rows: int = field(metadata=U16)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopbackConnect(Request):
    """Connect to a port inside the sandbox. Answered by :class:`PortConnected`, then raw bytes."""

    TAG: ClassVar[tuple[str, str]] = ("operation", "loopback_connect")

    host: str
    port: int = field(metadata=PORT)


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptNetwork(Request):
    """Take the next intercepted connection. Answered by :class:`NetworkConnected`; has no idle timeout."""

    TAG: ClassVar[tuple[str, str]] = ("operation", "accept_network")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenMediation(Request):
    """Open the DNS mediation on a ``Mediate`` stream. Answered by :class:`MediationReady`."""

    TAG: ClassVar[tuple[str, str]] = ("operation", "open_mediation")


REQUESTS: Mapping[str, type[Request]] = {
    cls.TAG[1]: cls
    for cls in (
        DiscoverPolicy,
        Attach,
        Confirm,
        ProbeProviderFiles,
        StartAgent,
        UpdateProviderEnvironment,
        AttachProcess,
        Wait,
        SignalProcess,
        Terminate,
        TerminateBoundary,
        Exec,
        ExecSignal,
        Resize,
        LoopbackConnect,
        AcceptNetwork,
        OpenMediation,
    )
}


def request_to_object(request: Request) -> JsonObject:
    """The JSON object of a request, as it is transmitted and digested."""
    return encode_object(request)


def request_from_object(value: object) -> Request:
    """Read a request; unknown operations and fields are refused.

    Raises:
        DocumentError: naming the member that is wrong.
    """
    return decode_tagged(REQUESTS, "operation", value, "request")


__all__ = [
    "REQUESTS",
    "AcceptNetwork",
    "AgentSpec",
    "Attach",
    "AttachProcess",
    "Attached",
    "BoundaryTerminated",
    "Confirm",
    "Confirmation",
    "Confirmed",
    "ConnectTiming",
    "DiscoverPolicy",
    "EnforcedProperty",
    "ErrorResult",
    "Exec",
    "ExecSignal",
    "ExecSpec",
    "ExecStarted",
    "ExecutableIdentity",
    "ExitKind",
    "ExitStatus",
    "Exited",
    "ImagePolicy",
    "LandlockRequirement",
    "LoopbackConnect",
    "MediationReady",
    "NetworkConnected",
    "NetworkMode",
    "OpenMediation",
    "Policy",
    "PortConnected",
    "ProbeProviderFiles",
    "ProcessAttached",
    "ProcessKind",
    "ProcessSnapshot",
    "Properties",
    "ProviderEnvironmentUpdated",
    "ProviderFilesSupported",
    "Request",
    "Resize",
    "Resized",
    "ResolvedBinary",
    "Result",
    "RetainedOutput",
    "RuntimeHelper",
    "SessionSnapshot",
    "ShellCommand",
    "Signal",
    "SignalProcess",
    "Signaled",
    "SocketMetadata",
    "StartAgent",
    "Started",
    "Terminate",
    "TerminateBoundary",
    "Terminated",
    "UnresolvedBinary",
    "UpdateProviderEnvironment",
    "Wait",
    "request_from_object",
    "request_to_object",
    "result_from_object",
    "result_to_object",
]
