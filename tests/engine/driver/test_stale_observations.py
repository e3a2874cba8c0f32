"""What is observed of an earlier run says nothing about this one (field report 7, compute-driver contract 5.9)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from scripted.compute_gateway import launch_authentication, ready
from scripted.retained import start, stop, stopped, wait_ready_again
from scripted.scripted_engine import ScriptedEngine

from openshell.wire.compute.v1 import compute_driver_pb2 as pb

if TYPE_CHECKING:
    from scripted.compute_gateway import ComputeGateway
    from scripted.driver_bench import DriverBench

    from driver_docker.engine import Engine


class _Wrap:
    """Puts a scripted engine between."""

    engine: ScriptedEngine

    def __call__(self, engine: Engine) -> ScriptedEngine:
        self.engine = ScriptedEngine(engine)
        return self.engine


def _reasons(link: ComputeGateway, sandbox_id: str, seen: int) -> list[str]:
    return [ready(e.sandbox.sandbox).reason for _, e in link.events[seen:] if e.sandbox.sandbox.id == sandbox_id]


async def _get(link: ComputeGateway, sandbox_id: str) -> pb.DriverSandbox:
    got = await link.stub.GetSandbox(pb.GetSandboxRequest(sandbox_id=sandbox_id))
    observed: pb.DriverSandbox = got.sandbox
    return observed


async def test_a_late_ready_does_not_revive_a_stopped_sandbox(bench: DriverBench) -> None:
    wrap = _Wrap()
    async with bench.running(wrap=wrap) as (_, link):
        wanted = bench.sandbox()
        await bench.launch(link, wanted)
        with wrap.engine.hold("inspect_container", calls=1) as held:
            late = asyncio.create_task(_get(link, wanted.id))
            await held.reached.wait()  # its answer says running
            await stop(link, wanted.id)
            seen = len(link.events)
            held.release()
            assert ready(await late).reason == "ContainerStopped"
        assert await stopped(link, wanted.id)
        assert _reasons(link, wanted.id, seen) == []
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))


async def test_a_late_health_of_a_stopped_start_is_not_told(bench: DriverBench) -> None:
    wrap = _Wrap()
    async with bench.running(wrap=wrap) as (_, link):
        wanted = bench.sandbox()
        await bench.launch(link, wanted)
        await stop(link, wanted.id)
        with wrap.engine.hold("exec_command") as held:
            await start(link, wanted.id, "g-2", launch_authentication(generation="g-2"))
            await held.reached.wait()  # healthy, but nobody knows yet
            await stop(link, wanted.id)
            seen = len(link.events)
        assert await stopped(link, wanted.id)
        assert _reasons(link, wanted.id, seen) == []
        await start(link, wanted.id, "g-3", launch_authentication(generation="g-3"))
        await wait_ready_again(link, wanted.id, seen)
        assert _reasons(link, wanted.id, seen)[0] == "Starting", "nothing of the start that was stopped"
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))


async def test_field_report_07_an_old_exit_does_not_end_a_new_run(bench: DriverBench) -> None:
    wrap = _Wrap()
    async with bench.running(wrap=wrap, resync_interval_seconds=1) as (_, link):
        wanted = bench.sandbox()
        await bench.launch(link, wanted)
        workload = bench.container(wanted.id, "sandbox")["Id"]
        wrap.engine.events_held = True
        bench.client.kill(workload, "SIGTERM")
        await asyncio.to_thread(bench.client.wait, workload, timeout=20)
        with wrap.engine.hold("list_containers", calls=1) as held:
            await held.reached.wait()  # its row says exited
            seen = len(link.events)
            await start(link, wanted.id, "g-2", launch_authentication(generation="g-2"))
            await wait_ready_again(link, wanted.id, seen)
        wrap.engine.release_events()
        with wrap.engine.hold("list_containers", calls=1) as next_look:
            await next_look.reached.wait()  # the old row and the old events have been dealt with
        assert ready(await _get(link, wanted.id)).reason == "BackendReady"
        assert set(_reasons(link, wanted.id, seen)) == {"Starting", "BackendReady"}
        assert "Warning" not in {event.type for event in link.platform_events(wanted.id)}

        bench.client.kill(workload, "SIGUSR1")
        observed = await link.wait_reason(wanted.id, "ContainerExited")
        assert "code 7" in ready(observed).message, "a genuine new exit is told"
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))


async def test_an_exit_that_is_still_examined_when_the_next_run_begins_is_dropped(bench: DriverBench) -> None:
    wrap = _Wrap()
    async with bench.running(wrap=wrap) as (_, link):
        wanted = bench.sandbox()
        await bench.launch(link, wanted)
        workload = bench.container(wanted.id, "sandbox")["Id"]
        with wrap.engine.hold("inspect_container", calls=1, container=workload) as held:
            bench.client.kill(workload, "SIGTERM")
            await held.reached.wait()  # the exit's examination
            await stop(link, wanted.id)
            seen = len(link.events)
            await start(link, wanted.id, "g-2", launch_authentication(generation="g-2"))
            await wait_ready_again(link, wanted.id, seen)
        assert ready(await _get(link, wanted.id)).reason == "BackendReady"
        assert "Warning" not in {event.type for event in link.platform_events(wanted.id)}
        bench.client.kill(workload, "SIGUSR1")
        await link.wait_reason(wanted.id, "ContainerExited")
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))


async def test_a_start_behind_the_drivers_back_revives_nothing_and_is_put_right_by_the_next_start(
    bench: DriverBench,
) -> None:
    async with bench.running() as (_, link):
        wanted = bench.sandbox()
        await bench.launch(link, wanted)
        workload = bench.container(wanted.id, "sandbox")["Id"]
        await stop(link, wanted.id)
        bench.client.start(workload)
        await link.wait(lambda e: e.platform_event.event.reason == "StartedWhileStopped")
        await stop(link, wanted.id)  # waits for the driver's own stop, which is under way
        assert await stopped(link, wanted.id)
        seen = len(link.events)
        await start(link, wanted.id, "g-2", launch_authentication(generation="g-2"))
        await wait_ready_again(link, wanted.id, seen)
        await stop(link, wanted.id)
        bench.client.start(workload)
        await stop(link, wanted.id)
        assert bench.container(wanted.id, "sandbox")["State"]["Status"] == "exited"
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))
