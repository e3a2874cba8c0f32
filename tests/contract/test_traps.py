"""Traps on the way to the contract that need a whole driver to be seen (compute-driver contract 8.2)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
import pytest
from scripted.compute_gateway import ready
from scripted.retained import refusal, stop, stopped

from openshell.wire.compute.v1 import compute_driver_pb2 as pb

if TYPE_CHECKING:
    from scripted.deployment import Served

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_trap_03_a_supervisor_that_ends_just_before_its_stop_is_no_failure(served: Served) -> None:
    """The gateway closes the session before it asks for the stop, and the supervisor may be quicker."""
    wanted = served.bench.sandbox()
    await served.bench.launch(served.link, wanted)
    seen = len(served.link.events)
    supervisor, client = served.bench.container(wanted.id, "supervisor")["Id"], served.bench.client
    client.kill(supervisor, "SIGTERM")
    await asyncio.to_thread(client.wait, supervisor, timeout=20)
    for _ in range(6):  # long enough for the driver to have heard of it, short beside what it waits
        await served.observed(wanted.id)
    await stop(served.link, wanted.id)
    assert await stopped(served.link, wanted.id)
    later = [event for _, event in served.link.events[seen:]]
    told = {ready(each.sandbox.sandbox).reason for each in later if each.WhichOneof("payload") == "sandbox"}
    assert told <= {"ContainerStopped"}
    assert "Warning" not in {each.type for each in served.link.platform_events(wanted.id)}
    await served.delete(wanted.id)


async def test_trap_07_and_08_neither_a_sandbox_token_nor_a_name_of_ones_own_is_needed(served: Served) -> None:
    here, there = served.bench.sandbox("twin"), served.bench.sandbox("twin")
    there.workspace = "other"
    for each in (here, there):
        assert not each.spec.sandbox_token
        assert ready(await served.bench.launch(served.link, each)).reason == "BackendReady"
    for each in (here, there):
        got = await served.observed(each.id)
        assert (got.id, got.name, got.workspace) == (each.id, "twin", each.workspace)
    code, _ = await refusal(served.link.stub.GetSandbox(pb.GetSandboxRequest(name="twin")))
    assert code is grpc.StatusCode.FAILED_PRECONDITION, "a name alone could be either"
    answer = await served.link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=there.id, name="twin"))
    assert answer.deleted
    assert ready(await served.observed(here.id)).reason == "BackendReady"
    await served.delete(here.id)
