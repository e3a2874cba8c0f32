"""The supervisor's side of a boundary: connect, negotiate, open, and one typed method for each operation."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from openshell.isolation.documents import RuntimeDescriptor
from openshell.isolation.operations import (
    AgentSpec,
    Confirmation,
    ExitStatus,
    ImagePolicy,
    Policy,
    SessionSnapshot,
    Signal,
    Started,
)


class BackendClient:
    """A negotiated, opened boundary.

    Every method raises a ``BackendError``: the boundary's own error frame, or ``TransportLostError`` when the physical
    connection failed. Cancelling a method cancels its stream.

    Attributes:
        connection_lost: set when the physical connection is gone.
    """

    connection_lost: asyncio.Event

    @classmethod
    async def connect(
        cls,
        descriptor: RuntimeDescriptor,
        descriptor_json: bytes,
        *,
        sandbox_token: str,
        supervisor_instance_id: str,
        backend_name: str = "openshell-sandbox",
        implementation_version: str = "0",
    ) -> BackendClient:
        """Connect, negotiate and open the boundary.

        Args:
            descriptor: the parsed runtime descriptor.
            descriptor_json: its bytes as the driver wrote them, forwarded unchanged.
            sandbox_token: bearer for the Sandbox Protocol.
            supervisor_instance_id: UUID of this supervisor start.
            backend_name: the admitted backend.
            implementation_version: diagnostic version in the negotiation.

        Raises:
            TransportLostError: nothing answers or TLS failed.
            NegotiationError: version or capabilities do not fit.
            DeniedError: the boundary is another than the descriptor says, or the token was refused.
        """
        raise NotImplementedError

    async def discover_policy(self) -> ImagePolicy:
        """Ask for the image's policy (limit 5 min)."""
        raise NotImplementedError

    async def attach(self, policy: Policy) -> SessionSnapshot:
        """Attach with the descriptor's resource claims (limit 5 min). An error with ``is_refusal`` is a refusal."""
        raise NotImplementedError

    async def confirm(self) -> Confirmation:
        """Confirm, and check the evidence against the descriptor.

        Raises:
            ConfirmError: the evidence is missing something or is about another boundary.
        """
        raise NotImplementedError

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
        """Start the main process."""
        raise NotImplementedError

    async def wait(self, process_id: str) -> ExitStatus:
        """Wait for a process to end; no time limit."""
        raise NotImplementedError

    async def signal(self, process_id: str, signal: Signal) -> None:
        """Signal the main process."""
        raise NotImplementedError

    async def terminate(self, process_id: str) -> None:
        """End the main process."""
        raise NotImplementedError

    async def terminate_boundary(self) -> None:
        """End the boundary; succeeds also when it has already ended."""
        raise NotImplementedError

    async def close(self) -> None:
        """Cut the connection; the boundary then freezes a running workload. Idempotent."""
        raise NotImplementedError
