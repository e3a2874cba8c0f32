"""Verbs that the engine, the disk or the end of the driver keeps from coming to their end at once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
import pytest
from scripted import driver_process
from scripted.compute_gateway import ComputeGateway, launch_authentication, ready
from scripted.inside import (
    Wrap,
    ask_delete,
    check_gone,
    entry_of,
    folder_of,
    is_stopped,
    launch_over,
    recorded,
    stopped_one,
)
from scripted.retained import refusal, start, stop, wait_ready_again
from scripted.scripted_store import held_saves, refused_saves

from driver_docker.engine import EngineAbsentError, EngineRefusedError, EngineTimeoutError, EngineUnreachableError
from driver_docker.sandbox_record import RecordPhase
from openshell.wire.compute.v1 import compute_driver_pb2 as pb

if TYPE_CHECKING:
    from scripted.driver_bench import DriverBench


async def test_a_driver_that_is_ended_in_the_middle_of_a_stop_does_not_forget_it(bench: DriverBench) -> None:
    address = f"unix:{driver_process.socket_of(bench)}"
    async with (
        driver_process.serving(bench, **{"stop-grace-seconds": "60"}) as process,
        ComputeGateway(address) as link,
    ):
        wanted = bench.sandbox()
        wanted.spec.log_level = "stubborn"
        await bench.launch(link, wanted)
        stopping = asyncio.create_task(stop(link, wanted.id))
        await link.wait(lambda e: ready(e.sandbox.sandbox).status == "Unknown" if e.sandbox.sandbox.id else False)
        assert await driver_process.end(process) == 0
        await asyncio.gather(stopping, return_exceptions=True)
    assert recorded(bench, wanted.id) == RecordPhase.STOPPING
    async with (
        driver_process.serving(bench, **{"stop-grace-seconds": "1"}) as process,
        ComputeGateway(address) as link,
    ):
        await link.wait(lambda e: any(c.type == "Suspended" for c in e.sandbox.sandbox.status.conditions))
        assert await is_stopped(bench, link, wanted.id)
        assert "Warning" not in {event.type for event in link.platform_events(wanted.id)}
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))
        assert await driver_process.end(process) == 0


async def test_a_stop_of_a_launch_without_a_workload_is_completed_later_where_the_engine_refuses(
    bench: DriverBench,
) -> None:
    wrap = Wrap()
    async with bench.running(wrap=wrap) as (driver, link):
        wanted = bench.sandbox()
        with wrap.engine.hold("create_container", before=True) as creating:
            await link.stub.CreateSandbox(pb.CreateSandboxRequest(sandbox=wanted))
            await creating.reached.wait()
            sandbox = entry_of(driver, wanted.id)
            with wrap.engine.failing("list_containers", EngineTimeoutError("too busy"), calls=1):
                code, _ = await refusal(link.stub.StopSandbox(pb.StopSandboxRequest(sandbox_id=wanted.id)))
            assert code is grpc.StatusCode.UNAVAILABLE
        assert recorded(bench, wanted.id) == RecordPhase.DELETING
        driver.lifecycle.resume(sandbox)
        await check_gone(bench, driver, link, wanted.id)


@pytest.mark.parametrize("method", ["inspect_container", "stop_container"])
async def test_a_stop_of_a_launch_with_a_workload_is_completed_later_where_the_engine_refuses(
    bench: DriverBench, method: str
) -> None:
    wrap = Wrap()
    async with bench.running(wrap=wrap) as (driver, link):
        wanted = bench.sandbox("never")
        await link.stub.CreateSandbox(pb.CreateSandboxRequest(sandbox=wanted))
        with wrap.engine.hold("exec_command", calls=1) as probing:
            await probing.reached.wait()
        sandbox, seen = entry_of(driver, wanted.id), len(link.events)
        with wrap.engine.failing(method, EngineRefusedError("driver failed"), container=sandbox.record.workload_id):
            await refusal(link.stub.StopSandbox(pb.StopSandboxRequest(sandbox_id=wanted.id)))
        assert recorded(bench, wanted.id) == RecordPhase.STOPPING
        driver.lifecycle.resume(sandbox)
        await link.wait(lambda e: any(c.type == "Suspended" for c in e.sandbox.sandbox.status.conditions))
        assert await is_stopped(bench, link, wanted.id)
        told = {ready(e.sandbox.sandbox).status for _, e in link.events[seen:] if e.sandbox.sandbox.id}
        assert told == {"Unknown", "False"}, "it was never ready, and is not told as such"
        assert "Warning" not in {event.type for event in link.platform_events(wanted.id)}
        await ask_delete(driver, wanted.id)


async def test_a_stop_that_was_begun_is_completed_later_where_the_engine_refuses(bench: DriverBench) -> None:
    wrap = Wrap()
    async with bench.running(wrap=wrap) as (driver, link):
        wanted = bench.sandbox()
        await bench.launch(link, wanted)
        sandbox = entry_of(driver, wanted.id)
        with wrap.engine.failing("stop_container", EngineRefusedError("no"), container=sandbox.record.workload_id):
            await refusal(link.stub.StopSandbox(pb.StopSandboxRequest(sandbox_id=wanted.id)))
        got = await link.stub.GetSandbox(pb.GetSandboxRequest(sandbox_id=wanted.id))
        assert ready(got.sandbox).status == "Unknown", "its supervisor is gone, so it is not ready"
        driver.lifecycle.resume(sandbox)
        await link.wait(lambda e: any(c.type == "Suspended" for c in e.sandbox.sandbox.status.conditions))
        assert await is_stopped(bench, link, wanted.id)
        await ask_delete(driver, wanted.id)


async def test_a_stop_takes_a_supervisor_along_whose_creation_was_cut_short(bench: DriverBench) -> None:
    wrap = Wrap()
    async with bench.running(wrap=wrap) as (driver, link):
        wanted = await stopped_one(bench, link)
        with wrap.engine.hold("create_container") as made:
            await start(link, wanted.id, "g-2", launch_authentication(generation="g-2"))
            await made.reached.wait()  # it exists, but the driver has not heard its id
            await stop(link, wanted.id)
        assert await is_stopped(bench, link, wanted.id)
        await ask_delete(driver, wanted.id)


async def test_a_stop_of_a_launch_whose_workload_is_gone_tells_its_end(bench: DriverBench) -> None:
    wrap = Wrap()
    async with bench.running(wrap=wrap) as (driver, link):
        wanted = bench.sandbox("never")
        await link.stub.CreateSandbox(pb.CreateSandboxRequest(sandbox=wanted))
        with wrap.engine.hold("exec_command", calls=1) as probing:
            await probing.reached.wait()
        wrap.engine.events_held = True  # so that only the stop finds out
        bench.client.remove_container(entry_of(driver, wanted.id).record.workload_id, force=True)
        code, _ = await refusal(link.stub.StopSandbox(pb.StopSandboxRequest(sandbox_id=wanted.id)))
        assert code is grpc.StatusCode.NOT_FOUND
        observed = await link.wait_reason(wanted.id, "ContainerExited")
        assert "removed" in ready(observed).message
        wrap.engine.release_events()
        await ask_delete(driver, wanted.id)


async def test_what_is_left_of_a_failed_launch_is_removed_at_a_look_though_no_container_is(bench: DriverBench) -> None:
    wrap = Wrap()
    async with bench.running(wrap=wrap, resync_interval_seconds=1) as (driver, link):
        wanted = bench.sandbox("exit-9.x")
        with wrap.engine.failing("list_volumes", EngineTimeoutError("too busy"), calls=1):
            await bench.launch(link, wanted)
            sandbox = entry_of(driver, wanted.id)
            await launch_over(sandbox)
        assert len(bench.sandbox_left_over(wanted.id)) == 2, "its volumes"
        with wrap.engine.hold("list_volumes", calls=1) as look:
            await look.reached.wait()
        async with sandbox.lock:
            assert bench.sandbox_left_over(wanted.id) == []
            assert not (folder_of(bench, wanted.id) / "supervisor-auth.json").exists()
        await ask_delete(driver, wanted.id)


async def test_asking_again_for_a_start_that_an_outage_has_cut_goes_on_with_it(bench: DriverBench) -> None:
    wrap = Wrap()
    async with bench.running(wrap=wrap) as (driver, link):
        wanted = await stopped_one(bench, link)
        seen, launch = len(link.events), launch_authentication(generation="g-2")
        with wrap.engine.failing("put_archive", EngineUnreachableError("away"), calls=1):
            await start(link, wanted.id, "g-2", launch)
            await launch_over(entry_of(driver, wanted.id))
        await start(link, wanted.id, "g-2", launch)
        await wait_ready_again(link, wanted.id, seen)
        await ask_delete(driver, wanted.id)


async def test_a_ready_that_cannot_be_recorded_is_not_told(bench: DriverBench) -> None:
    async with bench.running() as (driver, link):
        wanted = bench.sandbox()
        with refused_saves(driver.services.store, RecordPhase.ACTIVE):
            observed = await bench.launch(link, wanted)
            assert ready(observed).status == "False"
            assert "No space left" in ready(observed).message
            await launch_over(entry_of(driver, wanted.id))
        assert bench.sandbox_left_over(wanted.id) == []
        assert recorded(bench, wanted.id) == RecordPhase.FAILED
        await ask_delete(driver, wanted.id)


async def test_a_stop_that_cannot_be_recorded_is_told_all_the_same_and_recorded_at_a_look(bench: DriverBench) -> None:
    wrap = Wrap()
    async with bench.running(wrap=wrap, resync_interval_seconds=1) as (driver, link):
        wanted = bench.sandbox()
        await bench.launch(link, wanted)
        with refused_saves(driver.services.store, RecordPhase.STOPPED) as full:
            await stop(link, wanted.id)
            await link.wait(lambda e: any(c.type == "Suspended" for c in e.sandbox.sandbox.status.conditions))
            assert recorded(bench, wanted.id) == RecordPhase.STOPPING
            full.reached.clear()
            await full.reached.wait()  # a look has tried again
        for _ in range(2):
            with wrap.engine.hold("list_containers", calls=1) as look:
                await look.reached.wait()
        assert recorded(bench, wanted.id) == RecordPhase.STOPPED
        await ask_delete(driver, wanted.id)


async def test_an_end_that_a_refused_stop_has_covered_is_told(bench: DriverBench) -> None:
    wrap = Wrap()
    async with bench.running(wrap=wrap) as (driver, link):
        wanted = bench.sandbox()
        await bench.launch(link, wanted)
        workload = entry_of(driver, wanted.id).record.workload_id
        with held_saves(driver.services.store, RecordPhase.STOPPING) as full:
            with wrap.engine.hold("inspect_container", calls=1, container=workload) as examined:
                bench.client.kill(workload, "SIGUSR1")
                await examined.reached.wait()
                stopping = asyncio.create_task(stop(link, wanted.id))
                await full.reached.wait()
            examination = [task for task in asyncio.all_tasks() if task.get_name().startswith("workload of")]
            await asyncio.gather(*examination)  # dropped: a stop is under way
            full.refused = True
            full.release()
            code, text = await refusal(stopping)
            assert "No space left" in text, code
        observed = await link.wait_reason(wanted.id, "ContainerExited")
        assert "code 7" in ready(observed).message
        await ask_delete(driver, wanted.id)


async def test_supervisors_of_earlier_runs_leave_nothing_in_memory(bench: DriverBench) -> None:
    async with bench.running() as (driver, link):
        wanted = await stopped_one(bench, link)
        sandbox = entry_of(driver, wanted.id)
        for number in range(2, 5):
            seen, generation = len(link.events), f"g-{number}"
            await start(link, wanted.id, generation, launch_authentication(generation=generation))
            await wait_ready_again(link, wanted.id, seen, failed_before=number == 4)
            if number == 3:
                bench.client.kill(sandbox.record.supervisor_id, "SIGKILL")
                await link.wait_reason(wanted.id, "ControlSupervisorExited")
            else:
                await stop(link, wanted.id)
        driver.services.config = driver.services.config.model_copy(update={"supervisor_image": bench.images.bare})
        await start(link, wanted.id, "g-5", launch_authentication(generation="g-5"))
        await launch_over(sandbox)
        assert sandbox.record.failure is not None
        own = {sandbox.record.workload_id}
        assert sandbox.intentional <= own
        assert sandbox.judged <= own
        assert set(sandbox.events) <= own
        await ask_delete(driver, wanted.id)


async def test_an_outage_while_a_start_is_judged_is_no_failure_of_it(bench: DriverBench) -> None:
    wrap = Wrap()
    async with bench.running(wrap=wrap) as (driver, link):
        wanted = await stopped_one(bench, link)
        sandbox = entry_of(driver, wanted.id)
        with (
            wrap.engine.hold("exec_command", before=True) as probing,
            wrap.engine.failing("exec_command", EngineAbsentError("gone, it seems")),
        ):
            await start(link, wanted.id, "g-2", launch_authentication(generation="g-2"))
            await probing.reached.wait()
            with wrap.engine.failing("inspect_container", EngineTimeoutError("no answer")):
                probing.release()
                await launch_over(sandbox)
        assert sandbox.record.phase is RecordPhase.STARTING
        assert "Warning" not in {event.type for event in link.platform_events(wanted.id)}
        seen = len(link.events)
        driver.lifecycle.resume(sandbox)
        await wait_ready_again(link, wanted.id, seen)
        await ask_delete(driver, wanted.id)
