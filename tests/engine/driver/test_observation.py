"""What the driver makes of what it sees, and of what it cannot see (the rows of docs/driver-states.md)."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import grpc
import pytest
from docker.errors import NotFound
from scripted.compute_gateway import launch_authentication, ready
from scripted.engine_proxy import EngineProxy, Road
from scripted.retained import refusal, start, stop, stopped, wait_ready_again

from driver_docker.engine_docker import DockerEngine
from openshell.verdicts import Verdict, VerdictKind
from openshell.wire.compute.v1 import compute_driver_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from scripted.compute_gateway import ComputeGateway
    from scripted.driver_bench import DriverBench

    from driver_docker.serve import Driver

GONE_ROADS = (Road.CUT, Road.SILENT, Road.HALF_CLOSED, Road.HOLLOW)


@asynccontextmanager
async def _behind_proxy(
    bench: DriverBench, **changes: object
) -> AsyncIterator[tuple[EngineProxy, Driver, ComputeGateway]]:
    async with EngineProxy.between(bench.folder / "e.sock", bench.docker_host) as proxy:
        far = await DockerEngine.connect(proxy.address)
        async with bench.running(wrap=lambda _: far, **changes) as (driver, link):
            yield proxy, driver, link
        await far.close()


async def _get(link: ComputeGateway, sandbox_id: str) -> pb.DriverSandbox:
    got = await link.stub.GetSandbox(pb.GetSandboxRequest(sandbox_id=sandbox_id))
    observed: pb.DriverSandbox = got.sandbox
    return observed


async def _delete(link: ComputeGateway, sandbox_id: str) -> None:
    await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=sandbox_id))


def _told(link: ComputeGateway, seen: int) -> list[str]:
    return [ready(e.sandbox.sandbox).reason for _, e in link.events[seen:] if e.WhichOneof("payload") == "sandbox"]


@pytest.mark.parametrize("road", GONE_ROADS, ids=lambda road: road.name.lower())
async def test_field_report_05_an_engine_that_cannot_be_asked_is_unavailable_and_no_news(
    bench: DriverBench, road: Road
) -> None:
    async with _behind_proxy(bench, resync_interval_seconds=1) as (proxy, _, link):
        wanted = bench.sandbox()
        await bench.launch(link, wanted)
        seen = len(link.events)
        await proxy.set(road)
        for call in (
            link.stub.GetSandbox(pb.GetSandboxRequest(sandbox_id=wanted.id)),
            link.stub.ListSandboxes(pb.ListSandboxesRequest()),
        ):
            code, _ = await refusal(call)
            assert code is grpc.StatusCode.UNAVAILABLE
        assert link.events[seen:] == [], "an outage is no news, and least of all a deletion"
        await proxy.set(Road.CUT)
        await proxy.set(Road.OPEN)
        await link.wait(lambda event: any(entry is event for _, entry in link.events[seen:]))
        assert _told(link, seen) == ["BackendReady"], "one fresh snapshot after it"
        assert bench.container(wanted.id, "supervisor")["State"]["Running"]
        await _delete(link, wanted.id)


async def test_a_stream_that_died_silently_is_found_out_and_read_anew(bench: DriverBench) -> None:
    async with _behind_proxy(bench, resync_interval_seconds=1) as (proxy, driver, link):
        wanted = bench.sandbox()
        await bench.launch(link, wanted)
        stream, seen = driver.services.event_stream, len(link.events)
        await proxy.set(Road.SILENT)
        bench.client.kill(bench.container(wanted.id, "supervisor")["Id"], "SIGKILL")
        await refusal(link.stub.ListSandboxes(pb.ListSandboxesRequest()))
        await proxy.set(Road.OPEN)  # for new connections: the old stream stays dead and never says so
        await link.wait_reason(wanted.id, "ControlSupervisorExited")
        assert driver.services.event_stream > stream
        assert "BackendReady" not in _told(link, seen)[1:]
        await _delete(link, wanted.id)


async def test_a_slow_engine_is_no_outage(bench: DriverBench) -> None:
    async with _behind_proxy(bench) as (proxy, _, link):
        proxy.delay_seconds = 0.15
        wanted = bench.sandbox()
        assert ready(await bench.launch(link, wanted)).reason == "BackendReady"
        assert ready(await _get(link, wanted.id)).reason == "BackendReady"
        proxy.delay_seconds = 0
        await _delete(link, wanted.id)


async def test_a_start_goes_on_after_an_outage(bench: DriverBench) -> None:
    async with _behind_proxy(bench) as (proxy, driver, link):
        wanted = bench.sandbox()
        await bench.launch(link, wanted)
        await stop(link, wanted.id)
        seen = len(link.events)
        await start(link, wanted.id, "g-2", launch_authentication(generation="g-2"))
        await proxy.set(Road.CUT)
        sandbox = driver.services.table.by_id(wanted.id)
        assert sandbox is not None
        assert sandbox.launch_task is not None
        await sandbox.launch_task
        assert set(_told(link, seen)) == {"Starting"}
        await proxy.set(Road.OPEN)
        await wait_ready_again(link, wanted.id, seen)
        assert "Warning" not in {event.type for event in link.platform_events(wanted.id)}
        await _delete(link, wanted.id)


async def test_a_stop_is_completed_after_an_outage(bench: DriverBench) -> None:
    async with _behind_proxy(bench, stop_grace_seconds=3) as (proxy, _, link):
        wanted = bench.sandbox()
        wanted.spec.log_level = "stubborn"
        await bench.launch(link, wanted)
        stopping = asyncio.create_task(stop(link, wanted.id))
        await link.wait(lambda e: ready(e.sandbox.sandbox).status == "Unknown" if e.sandbox.sandbox.id else False)
        await proxy.set(Road.CUT)
        code, _ = await refusal(stopping)
        assert code is grpc.StatusCode.UNAVAILABLE
        await proxy.set(Road.OPEN)
        await link.wait_reason(wanted.id, "ContainerStopped")
        await link.wait(lambda e: any(c.type == "Suspended" for c in e.sandbox.sandbox.status.conditions))
        assert await stopped(link, wanted.id)
        assert "Warning" not in {event.type for event in link.platform_events(wanted.id)}
        await _delete(link, wanted.id)


async def test_field_report_06_an_engine_restart_that_ends_both_is_a_runtime_restart(bench: DriverBench) -> None:
    async with _behind_proxy(bench) as (proxy, _, link):
        wanted = bench.sandbox()
        await bench.launch(link, wanted)
        both = [bench.container(wanted.id, role)["Id"] for role in ("supervisor", "sandbox")]
        await proxy.set(Road.CUT)
        for container in both:  # what an engine without live-restore does when it ends
            bench.client.kill(container, "SIGTERM")
            await asyncio.to_thread(bench.client.wait, container, timeout=20)
        await proxy.set(Road.OPEN)
        await link.wait_reason(wanted.id, "ContainerRuntimeRestart")
        assert "ControlSupervisorExited" not in _told(link, 0)
        seen = len(link.events)
        await start(link, wanted.id, "g-2", launch_authentication(generation="g-2"))
        await wait_ready_again(link, wanted.id, seen, failed_before=True)
        assert ready(await _get(link, wanted.id)).reason == "BackendReady"
        await _delete(link, wanted.id)


async def test_field_report_11_a_child_killed_for_lack_of_memory_is_a_warning_and_no_phase(bench: DriverBench) -> None:
    async with bench.running() as (_, link):
        wanted = bench.sandbox()
        wanted.spec.template.resources.memory_limit = "16Mi"
        await bench.launch(link, wanted)
        workload = bench.container(wanted.id, "sandbox")["Id"]
        seen = len(link.events)
        child = bench.client.exec_create(workload, ["/bin/sh", "-c", "x=aaaaaaaa; while :; do x=$x$x; done"])["Id"]
        await asyncio.to_thread(bench.client.exec_start, child)
        _, event = await link.wait(lambda e: e.platform_event.event.reason == "OutOfMemory")
        told = event.platform_event.event
        assert (told.type, "workload" in told.message) == ("Warning", True)
        assert ready(await _get(link, wanted.id)).reason == "BackendReady"
        assert _told(link, seen) == []
        await _delete(link, wanted.id)


async def _pause(bench: DriverBench, link: ComputeGateway, seconds: float) -> None:
    wanted = bench.sandbox()
    await bench.launch(link, wanted)
    workload = bench.container(wanted.id, "sandbox")["Id"]
    bench.client.pause(workload)
    observed = await link.wait_reason(wanted.id, "ContainerPaused")
    assert (ready(observed).status, "paused" in ready(observed).message) == ("Unknown", True)
    assert ready(await _get(link, wanted.id)).status == "Unknown"
    await asyncio.sleep(seconds)
    seen = len(link.events)
    bench.client.unpause(workload)
    await wait_ready_again(link, wanted.id, seen)
    assert "Warning" not in {event.type for event in link.platform_events(wanted.id)}
    await _delete(link, wanted.id)


async def test_field_report_10_a_pause_is_unknown_and_its_end_a_fresh_snapshot(bench: DriverBench) -> None:
    async with bench.running() as (_, link):
        await _pause(bench, link, 0)


@pytest.mark.slow
async def test_a_pause_of_a_minute_is_a_pause(bench: DriverBench) -> None:
    async with bench.running(resync_interval_seconds=2) as (_, link):
        await _pause(bench, link, 60)


async def test_last_words_forged_by_the_workload_are_not_quoted(bench: DriverBench) -> None:
    async with bench.running() as (_, link):
        wanted = bench.sandbox("never")
        wanted.spec.log_level = "forge-5"
        observed = await bench.launch(link, wanted)
        assert "code 5" in ready(observed).message
        assert "the workload speaks" not in str(link.events)
        await _delete(link, wanted.id)


async def test_last_words_of_an_older_generation_are_not_quoted(bench: DriverBench) -> None:
    async with bench.running() as (_, link):
        wanted = bench.sandbox("late-6.x")
        await bench.launch(link, wanted)
        bench.client.kill(bench.container(wanted.id, "supervisor")["Id"], "SIGUSR1")
        observed = await link.wait_reason(wanted.id, "ControlSupervisorExited")
        assert "gateway not reachable" in ready(observed).message
        seen = len(link.events)
        await start(link, wanted.id, "g-2", launch_authentication(generation="g-2"))
        await wait_ready_again(link, wanted.id, seen, failed_before=True)
        seen = len(link.events)
        bench.client.kill(bench.container(wanted.id, "supervisor")["Id"], "SIGKILL")
        _, event = await link.wait(
            lambda e: e.platform_event.event.type == "Warning" and any(x is e for _, x in link.events[seen:])
        )
        verdict = Verdict.from_metadata(event.platform_event.event.metadata)
        assert verdict is not None
        assert (verdict.kind, verdict.generation, verdict.words) == (VerdictKind.KILLED_THROUGH_ENGINE, "g-2", "")
        await _delete(link, wanted.id)


async def test_other_containers_with_the_sandboxs_id_change_no_answer_and_go_with_it(bench: DriverBench) -> None:
    async with bench.running() as (_, link):
        wanted = bench.sandbox()
        observed = await bench.launch(link, wanted)
        labels = [bench.container(wanted.id, role)["Config"]["Labels"] for role in ("sandbox", "supervisor")]
        for each in labels:
            other = bench.client.create_container(bench.images.workload, ["/bin/sh", "-c", "exit 3"], labels=each)
            bench.client.start(other["Id"])
            await asyncio.to_thread(bench.client.wait, other["Id"], timeout=20)
            assert await _get(link, wanted.id) == observed
            listed = await link.stub.ListSandboxes(pb.ListSandboxesRequest())
            assert list(listed.sandboxes) == [observed]
        await _delete(link, wanted.id)
        assert bench.sandbox_left_over(wanted.id) == []
        assert "Warning" not in {event.type for event in link.platform_events(wanted.id)}


async def test_a_running_twin_does_not_stand_in_for_a_container_that_is_gone(bench: DriverBench) -> None:
    async with bench.running() as (_, link):
        wanted = bench.sandbox()
        await bench.launch(link, wanted)
        found = bench.container(wanted.id, "sandbox")
        twin = bench.client.create_container(
            bench.images.workload, ["/bin/sh", "-c", "sleep 60"], labels=found["Config"]["Labels"]
        )
        bench.client.start(twin["Id"])
        bench.client.remove_container(found["Id"], force=True)
        observed = await link.wait_reason(wanted.id, "ContainerExited")
        assert "removed" in ready(observed).message
        assert ready(await _get(link, wanted.id)) == ready(observed)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await link.stub.StopSandbox(pb.StopSandboxRequest(sandbox_id=wanted.id))
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    async with bench.running() as (_, link):
        with pytest.raises(NotFound):
            bench.client.inspect_container(twin["Id"])
        assert "removed" in ready(await _get(link, wanted.id)).message
        await _delete(link, wanted.id)
        assert bench.sandbox_left_over(wanted.id) == []
