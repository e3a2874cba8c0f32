"""An engine that goes away or falls silent is no news about any sandbox."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
import pytest
from scripted import driver_process
from scripted.compute_gateway import ComputeGateway, ready
from scripted.driver_bench import NAMESPACE
from scripted.engine_proxy import EngineProxy, Road

from openshell.wire.compute.v1 import compute_driver_pb2 as pb

if TYPE_CHECKING:
    from scripted.driver_bench import DriverBench


async def test_an_outage_is_unavailable_and_what_ended_in_it_is_told_afterwards(bench: DriverBench) -> None:
    async with (
        EngineProxy.between(bench.folder / "e.sock", bench.docker_host) as proxy,
        driver_process.serving(bench, **{"docker-socket": str(proxy.path)}) as process,
        ComputeGateway(f"unix:{driver_process.socket_of(bench)}") as link,
    ):
        kept, lost = bench.sandbox("kept"), bench.sandbox("late-6.lost")
        for sandbox in (kept, lost):
            await bench.launch(link, sandbox)
        told = len(link.events)
        await proxy.set(Road.CUT)
        for call in (
            link.stub.GetSandbox(pb.GetSandboxRequest(sandbox_id=kept.id)),
            link.stub.ListSandboxes(pb.ListSandboxesRequest()),
            link.stub.StopSandbox(pb.StopSandboxRequest(sandbox_id=kept.id)),
            link.stub.CreateSandbox(pb.CreateSandboxRequest(sandbox=bench.sandbox())),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        supervisor = bench.container(lost.id, "supervisor")["Id"]
        bench.client.kill(supervisor, "SIGUSR1")
        await asyncio.to_thread(bench.client.wait, supervisor, timeout=20)
        late = link.stub.WatchSandboxes(pb.WatchSandboxesRequest())
        assert ready((await late.read()).sandbox.sandbox).reason == "BackendReady"
        late.cancel()
        assert len(link.events) == told, "an outage is no news"

        await proxy.set(Road.OPEN)
        observed = await link.wait_reason(lost.id, "ControlSupervisorExited")
        assert "code 6" in ready(observed).message
        got = await link.stub.GetSandbox(pb.GetSandboxRequest(sandbox_id=kept.id))
        assert ready(got.sandbox).reason == "BackendReady"
        for sandbox in (kept, lost):
            await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=sandbox.id))
        assert await driver_process.end(process) == 0


async def test_a_silent_engine_does_not_keep_the_driver_from_ending(bench: DriverBench) -> None:
    async with EngineProxy.between(bench.folder / "e.sock", bench.docker_host) as proxy:
        async with (
            driver_process.serving(bench, **{"docker-socket": str(proxy.path)}) as process,
            ComputeGateway(f"unix:{driver_process.socket_of(bench)}") as link,
        ):
            wanted = bench.sandbox("never")
            await link.stub.CreateSandbox(pb.CreateSandboxRequest(sandbox=wanted))
            await link.wait(lambda e: e.platform_event.event.reason == "Created")
            await proxy.set(Road.SILENT)
            begun = asyncio.get_running_loop().time()
            assert await driver_process.end(process) == 0
            assert asyncio.get_running_loop().time() - begun < 6
        await proxy.set(Road.CUT)
    async with driver_process.serving(bench) as process:
        assert await driver_process.end(process) == 0
    assert bench.left_over() == []


async def test_a_slow_engine_has_all_the_time_there_is_to_tidy_up_in(bench: DriverBench) -> None:
    filling = {"label": f"{NAMESPACE}={bench.namespace}", "type": "container", "event": "create"}
    async with EngineProxy.between(bench.folder / "e.sock", bench.docker_host) as proxy:
        proxy.delay_seconds = 0.6
        events = bench.client.events(filters=filling, decode=True)
        try:
            async with driver_process.serving(bench, **{"docker-socket": str(proxy.path)}) as process:
                await asyncio.wait_for(asyncio.to_thread(next, events), 20)
                assert await driver_process.end(process) == 0
        finally:
            events.close()
    assert bench.left_over() == []


@pytest.mark.parametrize(("swallowed", "delay_seconds"), [(b"DELETE /", 0.0), (b"", 4.5)])
async def test_answers_that_are_lost_or_late_do_not_keep_the_driver_from_ending(
    bench: DriverBench, swallowed: bytes, delay_seconds: float
) -> None:
    delivered = {"label": f"{NAMESPACE}={bench.namespace}", "type": "container", "event": "destroy"}
    async with EngineProxy.between(bench.folder / "e.sock", bench.docker_host) as proxy:
        events = bench.client.events(filters=delivered, decode=True)
        try:
            async with driver_process.serving(bench, **{"docker-socket": str(proxy.path)}) as process:
                await asyncio.wait_for(asyncio.to_thread(next, events), 20)
                proxy.swallowed, proxy.delay_seconds = swallowed, delay_seconds
                begun = asyncio.get_running_loop().time()
                assert await driver_process.end(process) == 0
                assert asyncio.get_running_loop().time() - begun < 6
        finally:
            events.close()
    async with driver_process.serving(bench) as process:
        assert await driver_process.end(process) == 0
    assert bench.left_over() == []


async def test_a_driver_that_waits_for_a_silent_engine_can_be_interrupted(bench: DriverBench) -> None:
    async with EngineProxy.between(bench.folder / "e.sock", bench.docker_host) as proxy:
        await proxy.set(Road.SILENT)
        process = await driver_process.spawn(driver_process.flags(bench, **{"docker-socket": str(proxy.path)}))
        async with asyncio.timeout(10):
            while not proxy.connections:  # noqa: ASYNC110 - another process connects
                await asyncio.sleep(0.05)
        assert await driver_process.end(process) == 0
        await process.communicate()
    assert not (bench.folder / "state").exists()
