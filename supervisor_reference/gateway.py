"""What the supervisor asks of its gateway: the values, and the interface behind which the wire stays."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from openshell.wire.sandbox.v1.sandbox_pb2 import SandboxPolicy
    from openshell.wire.v1.openshell_pb2 import GatewayMessage, SupervisorMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The generation of a configuration: an admission is about exactly this (isolation contract 4.1)."""

    policy_version: int
    policy_hash: str
    config_revision: int
    provider_env_revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigurationSnapshot:
    """The effective configuration as the gateway serves it (``GetSandboxConfigResponse``)."""

    generation: Generation
    policy: SandboxPolicy | None
    """The effective policy; None where the sandbox has none yet."""
    from_global_policy: bool
    """Whether a gateway-wide policy is active, so that nothing may be written for the sandbox."""
    admitted: bool
    """Whether the gateway itself holds the configuration for valid."""
    instance_id: str
    """The supervisor instance that the gateway knows; the fence of a registration."""
    error: str
    """The gateway's diagnostic; empty where it has none."""
    workspace: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderEnvironment:
    """Credentials and files that attached providers contribute to the agent's environment."""

    revision: int
    environment: Mapping[str, str] = field(repr=False)
    files: Mapping[str, str] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewedTokens:
    """Tokens that replace the ones at hand; an absent one stays as it is."""

    gateway_token: str = field(repr=False)
    gateway_expires_at: datetime | None
    sandbox_token: str = field(repr=False)
    sandbox_expires_at: datetime | None
    session_id: str
    credential_epoch: int


class AdmissionState(Enum):
    """What a supervisor reports about a configuration (``ConfigurationAdmissionState``)."""

    PENDING = "pending"
    ACCEPTED = "accepted"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionReport:
    """One ``ReportSandboxConfiguration`` (isolation contract 4.1)."""

    state: AdmissionState
    generation: Generation
    expected_instance_id: str
    error: str = ""
    refused_before_start: bool = False
    """With REJECTED only: the backend refused to attach before any workload instruction ran."""


class SupervisorStream(Protocol):
    """One open ``ConnectSupervisor`` call."""

    async def send(self, message: SupervisorMessage) -> None:
        """Send one message.

        Raises:
            GatewayError: The stream is broken.
        """

    async def receive(self) -> GatewayMessage | None:
        """Return the next message, or None when the gateway ended the stream with OK.

        Raises:
            GatewayError: The stream ended with another status.
        """

    def cancel(self) -> None:
        """End the call from this side."""


class Gateway(Protocol):
    """The calls of ``openshell.v1`` that a supervisor makes, each for the one sandbox it serves.

    Every method raises `GatewayError` with the status that the gateway answered; calls that the gateway does not
    answer are repeated for a bounded time first.
    """

    @property
    def address(self) -> str:
        """The gateway's endpoint as configured, for texts."""

    async def connect(self) -> None:
        """Wait until the gateway accepts connections.

        Raises:
            GatewayError: It did not within the limit; the reason names the concrete cause.
        """

    async def fetch_configuration(self) -> ConfigurationSnapshot:
        """Return the effective configuration (``GetSandboxConfig``)."""

    async def report_configuration(self, report: AdmissionReport) -> None:
        """Report an admission state (``ReportSandboxConfiguration``)."""

    async def report_refusal(self, report: AdmissionReport) -> None:
        """Report an Attach refusal in one bounded attempt, without a repetition."""

    async def report_policy_loaded(self, version: int) -> None:
        """Report that a policy revision is in force (``ReportPolicyStatus`` LOADED)."""

    async def report_policy_failed(self, version: int, load_error: str) -> None:
        """Report in one bounded attempt that a policy revision could not be loaded (``ReportPolicyStatus`` FAILED)."""

    async def write_policy(self, policy: SandboxPolicy, *, workspace: str) -> int:
        """Store a policy for the sandbox (``UpdateConfig``).

        Returns:
            The version of the revision that holds it.
        """

    async def fetch_provider_environment(self) -> ProviderEnvironment:
        """Return what providers contribute (``GetSandboxProviderEnvironment``)."""

    async def report_main_process_exit(self, exit_code: int) -> None:
        """Report the main process's exit (``ReportMainProcessExit``)."""

    async def finalize_main_process_exit(self) -> None:
        """Say that nothing of the main process's output is outstanding (``FinalizeMainProcessExit``)."""

    async def refresh_tokens(self) -> RenewedTokens:
        """Exchange the tokens for fresh ones and use the gateway's from here on (``RefreshSandboxToken``)."""

    async def push_error_line(self, text: str) -> None:
        """Append an ERROR line of source ``supervisor`` to the sandbox's log (``PushSandboxLogs``)."""

    def connect_supervisor(self) -> SupervisorStream:
        """Open the session stream (``ConnectSupervisor``)."""

    async def close(self) -> None:
        """Close the channel."""
