"""The boundary as the supervisor uses it, and how it is reached (isolation contract 2 and 3)."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, Protocol

from openshell.isolation.documents import UnixTransport
from openshell.isolation.errors import TransportLostError
from openshell.verdicts import Category, Stage
from supervisor_reference.errors import StageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from openshell.isolation.operations import (
        AgentSpec,
        Confirmation,
        ExitStatus,
        ImagePolicy,
        Policy,
        SessionSnapshot,
        Started,
    )
    from supervisor_reference.selection import BoundaryPlan
    from supervisor_reference.timing import Timing

_log = logging.getLogger(__name__)

RECOVERY_SECONDS: Final = 30.0
"""How long a lost connection is tried to be replaced: as long as a boundary waits for it (isolation contract 3.6)."""


class Boundary(Protocol):
    """An opened boundary. Every method raises an ``openshell.isolation.errors.IsolationError``.

    Once confirmed, a lost connection is replaced behind these methods; only one that cannot be replaced is an error.
    """

    async def discover_policy(self) -> ImagePolicy:
        """Return the policy that the image ships."""

    async def attach(self, policy: Policy) -> SessionSnapshot:
        """Bind the boundary to this supervisor and a policy."""

    async def confirm(self) -> Confirmation:
        """Return the checked evidence of enforcement."""

    async def start_agent(
        self,
        spec: AgentSpec,
        policy: Policy,
        *,
        provider_env_revision: int = 0,
        provider_env: Mapping[str, str] | None = None,
        provider_files: Mapping[str, bytes] | None = None,
    ) -> Started:
        """Start the main process."""

    async def wait(self, process_id: str) -> ExitStatus:
        """Wait for a process to end."""

    async def renew_token(self, sandbox_token: str) -> None:
        """Go on with another token."""

    async def terminate_boundary(self) -> None:
        """End every process and the boundary."""

    async def close(self) -> None:
        """Cut the connection."""


class OpenBoundary(Protocol):
    """A way to reach the boundary of a plan."""

    async def __call__(self, plan: BoundaryPlan, *, sandbox_token: str, instance_id: str) -> Boundary:
        """Connect, negotiate and open.

        Raises:
            TransportLostError: Nobody answers yet.
            IsolationError: The boundary refuses.
        """


async def connect_backend(
    plan: BoundaryPlan, *, sandbox_token: str, instance_id: str, recovery_seconds: float = RECOVERY_SECONDS
) -> Boundary:
    """Open the boundary over the Sandbox Protocol (see `OpenBoundary`).

    Args:
        plan: The boundary.
        sandbox_token: Bearer for the Sandbox Protocol.
        instance_id: UUID of this supervisor start.
        recovery_seconds: How long a lost connection is tried to be replaced.
    """
    from openshell.isolation.client import BackendClient

    return await BackendClient.connect(
        plan.descriptor,
        plan.driver_descriptor,
        sandbox_token=sandbox_token,
        supervisor_instance_id=instance_id,
        backend_name=plan.backend_name,
        recovery_seconds=recovery_seconds,
    )


async def open_when_ready(
    open_boundary: OpenBoundary, plan: BoundaryPlan, *, sandbox_token: str, instance_id: str, timing: Timing
) -> Boundary:
    """Open the boundary, giving its runtime time to start serving (compute-driver contract 5.7: 20 s).

    Args:
        open_boundary: How to reach it.
        plan: The boundary.
        sandbox_token: Bearer for the Sandbox Protocol.
        instance_id: UUID of this supervisor start.
        timing: Limits.

    Raises:
        StageError: Nobody answered in time.
        IsolationError: The boundary refused.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timing.control_socket_seconds
    told = False
    while True:
        try:
            return await open_boundary(plan, sandbox_token=sandbox_token, instance_id=instance_id)
        except TransportLostError as error:
            if loop.time() + timing.control_socket_pause_seconds >= deadline:
                raise StageError(
                    stage=Stage.BUILD,
                    category=Category.INFRASTRUCTURE,
                    public=f"the boundary at {_place(plan)} did not answer within "
                    f"{timing.control_socket_seconds:g} s; the sandbox runtime may not be running",
                    private=error.message,
                    status=error.status,
                    retryable=True,
                ) from error
            if not told:
                told = True
                _log.info("the boundary at %s does not answer yet: %s", _place(plan), error.message)
        await asyncio.sleep(timing.control_socket_pause_seconds)


def _place(plan: BoundaryPlan) -> str:
    transport = plan.descriptor.transport
    return transport.socket_path if isinstance(transport, UnixTransport) else "its registered endpoint"
