"""A backend of a few lines on the kit's own server, over a real TLS socket."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from unit.supervisor.fake_gateway import SANDBOX_ID
from unit.supervisor.launch_material import GATEWAY_ID, GENERATION

from openshell.isolation.backend import Backend
from openshell.isolation.operations import (
    Attach,
    Confirmation,
    EnforcedProperty,
    ExitStatus,
    ImagePolicy,
    Properties,
    SessionSnapshot,
    Signal,
    StartAgent,
    Started,
)
from openshell.isolation.server import BoundaryServer
from openshell.isolation.tls import server_context
from openshell.isolation.tokens import TokenProfile, TokenVerifier

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from unit.supervisor.launch_material import LaunchMaterial

    from openshell.isolation.errors import BackendError

PROCESS_ID = f"{GENERATION}:main"


class ToyBackend(Backend):
    """Runs one process that exists in name only."""

    def __init__(self, launch: LaunchMaterial) -> None:
        self._launch = launch
        self.attached: Attach | None = None
        self.started: StartAgent | None = None
        self.ended: asyncio.Future[ExitStatus] = asyncio.get_running_loop().create_future()
        self.terminated = asyncio.Event()
        self.frozen = asyncio.Event()
        self.freezes = 0
        self.refusal: BackendError | None = None
        self.waits: asyncio.Queue[str] = asyncio.Queue()
        """One entry for each `wait` that was asked for."""

    async def discover_policy(self) -> ImagePolicy:
        return ImagePolicy()

    async def attach(self, request: Attach) -> SessionSnapshot:
        if self.refusal is not None:
            raise self.refusal
        self.attached = request
        return await self.snapshot()

    async def snapshot(self) -> SessionSnapshot:
        return SessionSnapshot(generation=GENERATION)

    async def confirm(self) -> Confirmation:
        bootstrap = self._launch.bootstrap
        enforced = EnforcedProperty(mechanism="toy")
        return Confirmation(
            generation=bootstrap.generation,
            identity=bootstrap.workload_identity,
            properties=Properties(
                filesystem_confinement=enforced,
                egress_interception=enforced,
                request_attribution=enforced,
                privilege_floor=enforced,
            ),
            session_id=bootstrap.session_id,
            outer_fence=bootstrap.outer_fence,
            resource_claims=bootstrap.resource_claims,
        )

    async def start_agent(self, request: StartAgent) -> Started:
        self.started = request
        return Started(process_id=PROCESS_ID, provider_env_revision=request.provider_env_revision)

    async def wait(self, process_id: str) -> ExitStatus:
        self.waits.put_nowait(process_id)
        return await asyncio.shield(self.ended)

    async def signal(self, process_id: str, signal: Signal) -> None:
        raise NotImplementedError

    async def terminate(self, process_id: str) -> None:
        raise NotImplementedError

    async def terminate_boundary(self) -> None:
        self.terminated.set()

    async def freeze(self) -> None:
        self.freezes += 1
        self.frozen.set()

    async def resume(self) -> None:
        self.frozen.clear()


@contextlib.asynccontextmanager
async def served(backend: ToyBackend, launch: LaunchMaterial, socket_path: Path) -> AsyncIterator[BoundaryServer]:
    """Serve a backend at the socket that the launch names."""
    server = BoundaryServer(
        backend,
        bootstrap=launch.bootstrap,
        tls=server_context(
            certificate_chain_pem=launch.tls.certificate_chain_pem, private_key_pem=launch.tls.private_key_pem
        ),
        verifier=TokenVerifier(
            profile=TokenProfile.SANDBOX,
            gateway_id=GATEWAY_ID,
            keys=launch.bootstrap.verification_keys,
            sandbox_id=SANDBOX_ID,
            runtime_generation=GENERATION,
        ),
    )
    await server.start_unix(socket_path)
    try:
        yield server
    finally:
        await server.close()


def cut(server: BoundaryServer) -> None:
    """Lose every physical connection, as a network would."""
    for connection in server._terminator.connections:
        connection.close()
