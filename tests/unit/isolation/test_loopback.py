"""A supervisor's client against a served backend, over TLS on a real socket."""

from __future__ import annotations

import asyncio

from openshell.isolation.operations import AgentSpec, ExitStatus, Signal
from tests.unit.isolation.toy_boundary import POLICY, Boundary

SPEC = AgentSpec(program="/bin/true", workdir="/sandbox")


async def test_a_sandbox_runs_from_attach_to_exit(boundary: Boundary) -> None:
    client = await boundary.connect()
    assert (await client.discover_policy()).yaml == "version: 1\n"
    snapshot = await client.attach(POLICY)
    assert snapshot.generation == "generation-1"
    confirmation = await client.confirm()
    assert confirmation.backend_audit == {"toy": True}
    started = await client.start_agent(SPEC, POLICY, provider_env={"A": "1"}, provider_files={"f": b"\x00\xff"})
    assert boundary.backend.started_with is not None
    assert boundary.backend.started_with.provider_files == {"f": b"\x00\xff"}
    waiting = asyncio.create_task(client.wait(started.process_id))
    await boundary.backend.until("wait")
    await client.signal(started.process_id, Signal.TERM)
    assert await waiting == ExitStatus.signaled(15)
    assert (await client.wait(started.process_id)).exit_code == 143
    assert boundary.backend.calls[:4] == ["discover_policy", "attach", "confirm", "start_agent"]
