"""The supervisor's side of a boundary: connect, negotiate, open, and one typed method for each operation."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import TypeVar

from openshell.isolation.boundary_connection import BoundaryConnection, BoundaryTarget
from openshell.isolation.documents import BUILT_IN_BACKEND, RuntimeDescriptor
from openshell.isolation.envelope import RequestEnvelope
from openshell.isolation.errors import DescriptorError, TerminatedError, TransportLostError, UnavailableError
from openshell.isolation.operations import (
    AgentSpec,
    Attach,
    Attached,
    BoundaryTerminated,
    Confirm,
    Confirmation,
    Confirmed,
    DiscoverPolicy,
    Exited,
    ExitStatus,
    ImagePolicy,
    Policy,
    ProbeProviderFiles,
    ProviderEnvironmentUpdated,
    ProviderFilesSupported,
    Request,
    Result,
    SessionSnapshot,
    Signal,
    Signaled,
    SignalProcess,
    StartAgent,
    Started,
    Terminate,
    TerminateBoundary,
    Terminated,
    UpdateProviderEnvironment,
    Wait,
)
from openshell.isolation.recovery import ATTACH_SECONDS, REQUEST_SECONDS, ConnectionKeeper, require_generation

_R = TypeVar("_R", bound=Result)


class BackendClient:
    """A negotiated, opened boundary.

    Methods raise a ``BackendError``: the boundary's own error frame, or ``TransportLostError`` when the physical
    connection failed and was not replaced; ``TokenError`` when the token is no longer accepted. Cancelling a method
    cancels its stream.
    """

    def __init__(self, target: BoundaryTarget, keeper: ConnectionKeeper, supervisor_instance_id: str) -> None:
        self._target = target
        self._keeper = keeper
        self._instance_id = supervisor_instance_id

    @classmethod
    async def connect(
        cls,
        descriptor: RuntimeDescriptor,
        descriptor_json: bytes,
        *,
        sandbox_token: str,
        supervisor_instance_id: str,
        backend_name: str = BUILT_IN_BACKEND,
        implementation_version: str = "0",
        recovery_seconds: float = 0.0,
    ) -> BackendClient:
        """Connect, negotiate and open the boundary.

        Args:
            descriptor: the parsed runtime descriptor.
            descriptor_json: its bytes as the driver wrote them, forwarded unchanged.
            sandbox_token: bearer for the Sandbox Protocol.
            supervisor_instance_id: UUID of this supervisor start.
            backend_name: the admitted backend.
            implementation_version: diagnostic version in the negotiation.
            recovery_seconds: how long a lost connection is tried to be replaced once confirmed (contract: 30); 0 fails
                at once.

        Raises:
            TransportLostError: nothing answers or TLS failed.
            NegotiationError: version or capabilities do not fit.
            DescriptorError: the boundary is another than the descriptor says.
            TokenError: the boundary refuses the token.
        """
        target = BoundaryTarget(
            descriptor=descriptor,
            descriptor_json=descriptor_json,
            backend_name=backend_name,
            implementation_version=implementation_version,
        )
        connection = await BoundaryConnection.open(target, sandbox_token=sandbox_token, generation=1)
        keeper = ConnectionKeeper(target, connection, sandbox_token=sandbox_token, recovery_seconds=recovery_seconds)
        return cls(target, keeper, supervisor_instance_id)

    @property
    def connection_lost(self) -> asyncio.Event:
        """Set when the present physical connection is gone; after a recovery, that of the new one."""
        return self._keeper.current.closed

    @property
    def backend_version(self) -> str:
        """The backend's implementation name and version, as it stated them; diagnostic only."""
        return self._keeper.current.peer_version

    async def discover_policy(self) -> ImagePolicy:
        """Ask for the image's policy (limit 5 min)."""
        return await self._ask(DiscoverPolicy(), ImagePolicy, ATTACH_SECONDS)

    async def attach(self, policy: Policy) -> SessionSnapshot:
        """Attach with the descriptor's resource claims (limit 5 min).

        Raises:
            BackendError: one whose ``is_refusal`` is true is a refusal of the configuration.
        """
        request = Attach(
            supervisor_instance_id=self._instance_id,
            policy=policy,
            resource_claims=self._target.descriptor.resource_claims,
        )
        envelope = RequestEnvelope.of(request)
        attached = await self._send(envelope, Attached, ATTACH_SECONDS)
        self._keeper.attach = envelope
        require_generation(self._target, attached)
        return attached.snapshot

    async def confirm(self) -> Confirmation:
        """Confirm, and check the evidence against the descriptor.

        The evidence of every later confirmation, after a loss or a renewal, is checked too; where it falls short, the
        connection is closed and every method raises the same error.

        Raises:
            ConfirmError: the evidence is missing something or is about another boundary.
        """
        self._keeper.confirm = self._keeper.confirm or RequestEnvelope.of(Confirm())
        confirmed = await self._send(self._keeper.confirm, Confirmed, REQUEST_SECONDS)
        return confirmed.confirmation

    async def supports_provider_files(self) -> bool:
        """Whether the boundary can deliver provider files."""
        try:
            await self._ask(ProbeProviderFiles(), ProviderFilesSupported)
        except TransportLostError:
            raise
        except UnavailableError:
            return False
        return True

    async def start_agent(
        self,
        spec: AgentSpec,
        policy: Policy,
        *,
        ca_cert: bytes | None = None,
        ca_bundle: bytes | None = None,
        provider_env_revision: int = 0,
        provider_env: Mapping[str, str] | None = None,
        provider_files: Mapping[str, bytes] | None = None,
    ) -> Started:
        """Start the main process; the only call that makes untrusted code run."""
        request = StartAgent(
            sandbox_id=self._target.descriptor.boundary_id,
            spec=spec,
            policy=policy,
            ca_cert=ca_cert,
            ca_bundle=ca_bundle,
            provider_env_revision=provider_env_revision,
            provider_env=provider_env or {},
            provider_files=provider_files or {},
        )
        return await self._ask(request, Started)

    async def update_provider_environment(
        self,
        *,
        generation: int,
        revision: int,
        provider_env: Mapping[str, str],
        provider_files: Mapping[str, bytes] | None = None,
    ) -> ProviderEnvironmentUpdated:
        """Replace the environment that later processes get."""
        request = UpdateProviderEnvironment(
            generation=generation, revision=revision, provider_env=provider_env, provider_files=provider_files or {}
        )
        return await self._ask(request, ProviderEnvironmentUpdated)

    async def wait(self, process_id: str) -> ExitStatus:
        """Wait for a process to end; no time limit."""
        return (await self._ask(Wait(process_id=process_id), Exited, None)).status

    async def signal(self, process_id: str, signal: Signal) -> None:
        """Signal the main process."""
        await self._ask(SignalProcess(process_id=process_id, signal=signal), Signaled)

    async def terminate(self, process_id: str) -> None:
        """End the main process."""
        await self._ask(Terminate(process_id=process_id), Terminated)

    async def terminate_boundary(self) -> None:
        """End the boundary; succeeds also when it has already ended. A lost connection is not recovered for it."""
        with contextlib.suppress(TerminatedError):
            envelope = RequestEnvelope.of(TerminateBoundary())
            await self._send(envelope, BoundaryTerminated, REQUEST_SECONDS, recovers=False)

    async def renew_token(self, sandbox_token: str) -> None:
        """Go on with another token; a newer epoch moves to a new connection, which replaces the present one.

        Raises:
            TokenError: the token has no readable epoch, or the boundary refuses it; the one before stays in use.
            ConfirmError: the boundary confirmed something else than it was launched as.
        """
        await self._keeper.renew(sandbox_token)

    async def close(self) -> None:
        """Cut the connection; the boundary then freezes a running workload. Idempotent."""
        await self._keeper.close()

    async def _ask(self, request: Request, expected: type[_R], timeout_seconds: float | None = REQUEST_SECONDS) -> _R:
        return await self._send(RequestEnvelope.of(request), expected, timeout_seconds)

    async def _send(
        self, envelope: RequestEnvelope, expected: type[_R], timeout_seconds: float | None, *, recovers: bool = True
    ) -> _R:
        result = await self._keeper.send(envelope, timeout_seconds=timeout_seconds, recovers=recovers)
        if not isinstance(result, expected):
            raise DescriptorError(f"the boundary answered {envelope.request['operation']} with {result.TAG[1]}")
        return result
