"""Requests that name an id, over the wire."""

from __future__ import annotations

import asyncio
import uuid

import grpc
from scripted.gateway_bench import WORKSPACE, GatewayBench, refused

from openshell.wire.v1 import openshell_pb2 as pb


async def test_a_repeated_request_id_creates_once(bench: GatewayBench) -> None:
    rid = str(uuid.uuid4())
    first = await bench.create(request_id=rid)
    request = pb.CreateSandboxRequest(
        name="alpha", workspace_scope=WORKSPACE, spec=pb.SandboxSpec(), request_id=rid.upper()
    )
    call = bench.stub.CreateSandbox(request)
    again = await call
    assert again.sandbox == first
    assert ("openshell-replayed", "true") in [*(await call.initial_metadata())]
    request.labels["other"] = "payload"
    await refused(bench.stub.CreateSandbox(request), grpc.StatusCode.INVALID_ARGUMENT, "another request")
    assert len(bench.driver.created) == 1


async def test_a_repeat_while_the_first_runs_waits_for_it(bench: GatewayBench) -> None:
    gate = bench.driver.gates["CreateSandbox"] = asyncio.Event()
    rid = str(uuid.uuid4())
    calls = [asyncio.create_task(bench.create(request_id=rid)) for _ in range(3)]
    await bench.driver.entered("CreateSandbox")
    gate.set()
    first, *others = await asyncio.gather(*calls)
    assert [other.metadata.id for other in others] == [first.metadata.id] * 2
    assert len(bench.driver.created) == 1


async def test_a_failed_request_may_be_repeated_under_its_id(bench: GatewayBench) -> None:
    rid = str(uuid.uuid4())
    bench.driver.failures["CreateSandbox"] = (grpc.StatusCode.UNAVAILABLE, "not now")
    await refused(bench.create(request_id=rid), grpc.StatusCode.INTERNAL, "not now")
    bench.driver.failures.clear()
    assert (await bench.create(request_id=rid)).metadata.name == "alpha"


async def test_a_request_that_a_stopped_gateway_began_is_not_run_again(bench: GatewayBench) -> None:
    bench.driver.gates["CreateSandbox"] = asyncio.Event()
    rid = str(uuid.uuid4())
    creating = asyncio.create_task(bench.create("", request_id=rid))
    await bench.driver.entered("CreateSandbox")
    await bench.gateway.stop()
    await asyncio.gather(creating, return_exceptions=True)
    bench.driver.gates.clear()
    await bench.start_gateway()
    error = await refused(bench.create("", request_id=rid), grpc.StatusCode.ABORTED, "its outcome is not known")
    details = dict(error.trailing_metadata())["grpc-status-details-bin"]
    assert isinstance(details, bytes)
    assert b"REQUEST_OUTCOME_UNCERTAIN" in details
    assert len(bench.driver.created) == 1
