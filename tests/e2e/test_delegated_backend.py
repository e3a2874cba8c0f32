"""A sandbox driven through an isolation backend that the operator registered, from the gateway to the agent's end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from scripted.isolation_boundary import ToyBackend
from scripted.stack import PATIENCE_SECONDS, SANDBOX_LABEL, Stack, running_stack

from openshell.isolation.documents import BoundaryBootstrap
from openshell.isolation.operations import ExitStatus, ImagePolicy
from openshell.isolation.server import BoundaryServer
from openshell.isolation.tls import SessionTls, issue_session_tls, server_context
from openshell.isolation.tokens import TokenProfile, TokenVerifier
from openshell.wire.v1 import openshell_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import pytest
    from docker import APIClient

NAME = "toy.backend-1"
OPERATORS_SESSION = "5f0c7f5e-0000-4000-8000-000000000077"


def _register(monkeypatch: pytest.MonkeyPatch, folder: Path, tls: SessionTls) -> Path:
    """Put a Unix backend into the driver's table and select it; where it is to listen."""
    anchor = folder / "ca.pem"
    anchor.write_text(tls.trust_anchor_pem)
    sockets = folder / "sockets"
    sockets.mkdir(mode=0o711)
    table = {
        NAME: {
            "kind": "unix",
            "socket_path": str(sockets / "boundary.sock"),
            "server_name": tls.server_name,
            "trust_anchor": str(anchor),
        }
    }
    monkeypatch.setenv("OPENSHELL_DOCKER_DRIVER_ISOLATION_BACKENDS", json.dumps(table))
    monkeypatch.setenv("OPENSHELL_DOCKER_DRIVER_ISOLATION_BACKEND", NAME)
    return sockets / "boundary.sock"


class ScratchBackend(ToyBackend):
    """A toy whose image brings no policy of its own."""

    async def discover_policy(self) -> ImagePolicy:
        await self.note("discover_policy")
        return ImagePolicy()


async def _started(stack: Stack, sandbox_id: str) -> None:
    """Until the supervisor's container has started; by then the driver has written what it launched with."""
    labels = [f"{SANDBOX_LABEL}={sandbox_id}", "openshell.ai/isolation-role=supervisor"]
    begun = int(time.time())

    def follow() -> None:
        # The engine ends the stream by itself, so that this thread never outlives the test.
        filters = {"label": labels, "event": ["start"]}
        until = begun + int(PATIENCE_SECONDS)
        with contextlib.closing(
            stack.engine.events(since=begun - 30, until=until, decode=True, filters=filters)
        ) as events:
            assert next(iter(events), None) is not None, "the supervisor was not started"

    await asyncio.to_thread(follow)


@asynccontextmanager
async def _served(stack: Stack, sandbox_id: str, socket: Path, tls: SessionTls) -> AsyncIterator[ToyBackend]:
    """The registered backend, serving the boundary that the driver provisioned."""
    await _started(stack, sandbox_id)
    records = stack.folder / "driver" / stack.namespace / sandbox_id
    bootstrap = BoundaryBootstrap.from_json((records / "boundary-bootstrap.json").read_bytes())
    backend = ScratchBackend(bootstrap)
    server = BoundaryServer(
        backend,
        bootstrap=bootstrap,
        tls=server_context(certificate_chain_pem=tls.certificate_chain_pem, private_key_pem=tls.private_key_pem),
        verifier=TokenVerifier(
            profile=TokenProfile.SANDBOX,
            gateway_id=bootstrap.gateway_id,
            keys=bootstrap.verification_keys,
            sandbox_id=sandbox_id,
            runtime_generation=bootstrap.generation,
        ),
        backend_name=NAME,
    )
    await server.start_unix(socket)
    try:
        yield backend
    finally:
        await server.close()


async def test_a_registered_backend_runs_the_agent_and_its_end_is_the_sandboxs(
    docker_host: str,
    docker_client: APIClient,
    workload_image: str,
    runtime_image: str,
    supervisor_image: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    tls = issue_session_tls(OPERATORS_SESSION)
    socket = _register(monkeypatch, tmp_path, tls)
    images = {"workload": workload_image, "runtime": runtime_image, "supervisor": supervisor_image}
    async with running_stack(docker_host, docker_client, images) as stack:
        sandbox = await stack.create("alpha", command=["serve", "--forever"])
        sandbox_id = sandbox.metadata.id
        async with _served(stack, sandbox_id, socket, tls) as backend:
            await stack.until_phase("alpha", pb.SANDBOX_PHASE_READY)
            order = [call for call in backend.calls if call in {"attach", "confirm", "start_agent"}]
            assert order == ["attach", "confirm", "start_agent"]
            assert backend.started_with is not None
            assert (backend.started_with.spec.program, backend.started_with.spec.args) == ("serve", ("--forever",))
            record = json.loads((stack.folder / "driver" / stack.namespace / sandbox_id / "record.json").read_bytes())
            assert record["isolation_backend"] == NAME
            (workload,) = stack.containers(sandbox, "sandbox")
            assert workload["Labels"]["openshell.ai/isolation-backend"] == NAME
            assert backend.ended is not None
            backend.ended.set_result(ExitStatus.exited(0))
            await stack.until_phase("alpha", pb.SANDBOX_PHASE_COMPLETED)
        await stack.delete("alpha")
