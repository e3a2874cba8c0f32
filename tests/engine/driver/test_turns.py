"""Verbs that meet: with each other, with a launch, with a look, with the end of the driver. One acts at a time."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import pytest
from scripted import driver_process
from scripted.compute_gateway import ComputeGateway, launch_authentication, ready
from scripted.retained import refusal, start, stop, stopped, wait_ready_again
from scripted.scripted_engine import ScriptedEngine
from scripted.scripted_store import held_saves, refused_saves

from driver_docker.engine import EngineAbsentError, EngineRefusedError, EngineTimeoutError, EngineUnreachableError
from driver_docker.records import RECORD_FILE, RecordPhase
from openshell.wire.compute.v1 import compute_driver_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from pathlib import Path

    from scripted.driver_bench import DriverBench

    from driver_docker.engine import Engine
    from driver_docker.sandboxes import Sandbox
    from driver_docker.serve import Driver

Result = TypeVar("Result")


class _Wrap:
    """Puts a scripted engine between."""

    engine: ScriptedEngine

    def __call__(self, engine: Engine) -> ScriptedEngine:
        self.engine = ScriptedEngine(engine)
        return self.engine


async def _begun(verb: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
    """A verb that has come as far as it gets without the engine or the disk."""
    task = asyncio.create_task(verb)
    for _ in range(20):
        await asyncio.sleep(0)
    return task


def _entry(driver: Driver, sandbox_id: str) -> Sandbox:
    sandbox = driver.services.table.by_id(sandbox_id)
    assert sandbox is not None
    return sandbox


async def _launch_over(sandbox: Sandbox) -> None:
    if sandbox.launch_task is not None:
        await asyncio.wait([sandbox.launch_task], timeout=30)


async def _create(link: ComputeGateway, wanted: pb.DriverSandbox) -> None:
    await link.stub.CreateSandbox(pb.CreateSandboxRequest(sandbox=wanted))


def _stop(driver: Driver, sandbox_id: str) -> Coroutine[Any, Any, None]:
    return driver.lifecycle.stop(sandbox_id=sandbox_id, name="")


def _start(driver: Driver, sandbox_id: str, generation: str) -> Coroutine[Any, Any, None]:
    launch = launch_authentication(generation=generation)
    return driver.lifecycle.start(sandbox_id=sandbox_id, name="", generation=generation, launch=launch)


def _is_after(link: ComputeGateway, seen: int, event: pb.WatchSandboxesEvent) -> bool:
    return any(entry is event for _, entry in link.events[seen:])


def _delete(driver: Driver, sandbox_id: str) -> Coroutine[Any, Any, bool]:
    return driver.lifecycle.delete(sandbox_id=sandbox_id, name="")


def _recorded(bench: DriverBench, sandbox_id: str) -> str:
    return str(json.loads((_folder(bench, sandbox_id) / RECORD_FILE).read_bytes())["phase"])


def _folder(bench: DriverBench, sandbox_id: str) -> Path:
    return bench.folder / "state" / bench.namespace / sandbox_id


def _running(bench: DriverBench, sandbox_id: str) -> list[str]:
    rows = bench.client.containers(filters={"label": f"openshell.ai/sandbox-id={sandbox_id}"})
    return [row["Labels"]["openshell.ai/isolation-role"] for row in rows]


async def _is_stopped(bench: DriverBench, link: ComputeGateway, sandbox_id: str) -> bool:
    """Whether it is told as stopped, is stopped, and has no supervisor."""
    assert _running(bench, sandbox_id) == []
    assert len(bench.sandbox_left_over(sandbox_id)) == 3, "the workload and its two volumes"
    return await stopped(link, sandbox_id)


async def _is_gone(bench: DriverBench, driver: Driver, link: ComputeGateway, sandbox_id: str) -> None:
    await link.wait_deleted(sandbox_id)
    assert bench.sandbox_left_over(sandbox_id) == []
    assert not _folder(bench, sandbox_id).exists()
    assert driver.services.table.by_id(sandbox_id) is None
    last = [e for _, e in link.events if sandbox_id in str(e)][-1]
    assert last.WhichOneof("payload") == "deleted", "nothing is told of a sandbox that is gone"


async def _stopped_one(bench: DriverBench, link: ComputeGateway, name: str = "steady") -> pb.DriverSandbox:
    wanted = bench.sandbox(name)
    await bench.launch(link, wanted)
    await stop(link, wanted.id)
    return wanted


async def test_a_stop_that_comes_while_a_start_is_accepted_stops_what_it_began(bench: DriverBench) -> None:
    wrap = _Wrap()
    async with bench.running(wrap=wrap) as (driver, link):
        wanted = await _stopped_one(bench, link)
        with wrap.engine.hold("inspect_container", calls=1) as held:
            starting = asyncio.create_task(start(link, wanted.id, "g-2", launch_authentication(generation="g-2")))
            await held.reached.wait()
            stopping = await _begun(_stop(driver, wanted.id))
            held.release()
            await asyncio.gather(starting, stopping)
        await _launch_over(_entry(driver, wanted.id))
        assert await _is_stopped(bench, link, wanted.id)
        await _delete(driver, wanted.id)


async def test_a_delete_that_comes_while_a_start_is_accepted_leaves_nothing(bench: DriverBench) -> None:
    wrap = _Wrap()
    async with bench.running(wrap=wrap) as (driver, link):
        wanted = await _stopped_one(bench, link)
        sandbox = _entry(driver, wanted.id)
        with wrap.engine.hold("inspect_container", calls=1) as held:
            starting = asyncio.create_task(start(link, wanted.id, "g-2", launch_authentication(generation="g-2")))
            await held.reached.wait()
            deleting = await _begun(_delete(driver, wanted.id))
            held.release()
            await starting
            assert await deleting
        await _launch_over(sandbox)
        await _is_gone(bench, driver, link, wanted.id)


async def test_a_look_in_the_middle_of_a_stop_does_not_go_on_with_the_start(bench: DriverBench) -> None:
    wrap = _Wrap()
    async with bench.running(wrap=wrap) as (driver, link):
        wanted = await _stopped_one(bench, link)
        sandbox = _entry(driver, wanted.id)
        with wrap.engine.failing("put_archive", EngineUnreachableError("away"), calls=1):
            await start(link, wanted.id, "g-2", launch_authentication(generation="g-2"))
            await _launch_over(sandbox)  # it goes on when the engine answers again
        assert sandbox.record.phase is RecordPhase.STARTING
        with wrap.engine.hold("inspect_container", calls=1) as held:
            stopping = asyncio.create_task(stop(link, wanted.id))
            await held.reached.wait()
            driver.lifecycle.resume(sandbox)
            held.release()
            await stopping
        await _launch_over(sandbox)
        assert await _is_stopped(bench, link, wanted.id)
        await _delete(driver, wanted.id)


@pytest.mark.parametrize("verb", [_stop, _delete])
async def test_a_verb_that_comes_while_a_create_is_reserved_ends_the_launch(bench: DriverBench, verb: Any) -> None:
    async with bench.running() as (driver, link):
        wanted = bench.sandbox()
        with held_saves(driver.services.store, RecordPhase.PROVISIONING) as held:
            creating = asyncio.create_task(_create(link, wanted))
            await held.reached.wait()
            sandbox = _entry(driver, wanted.id)
            ending = await _begun(verb(driver, wanted.id))
            held.release()
            await asyncio.gather(creating, ending)
        await _launch_over(sandbox)
        await _is_gone(bench, driver, link, wanted.id)


async def test_two_creates_of_a_failed_id_are_one_launch(bench: DriverBench) -> None:
    wrap = _Wrap()
    async with bench.running(wrap=wrap) as (driver, link):
        wanted = bench.sandbox("exit-9.x")
        await bench.launch(link, wanted)
        await _launch_over(_entry(driver, wanted.id))
        wanted.name, seen = "steady", len(link.events)
        with wrap.engine.hold("list_containers", calls=1) as held:
            first = asyncio.create_task(_create(link, wanted))
            await held.reached.wait()
            second = asyncio.create_task(_create(link, wanted))
            with wrap.engine.hold("ping", calls=1) as passed:
                await passed.reached.wait()
            held.release()
            await first
        code, _ = await refusal(second)
        assert code is grpc.StatusCode.ALREADY_EXISTS
        await wait_ready_again(link, wanted.id, seen)
        assert sorted(_running(bench, wanted.id)) == ["sandbox", "supervisor"]
        assert (_folder(bench, wanted.id) / "supervisor-auth.json").exists()
        await _delete(driver, wanted.id)


async def test_clearing_a_failed_launch_leaves_alone_the_sandbox_that_has_taken_its_id(bench: DriverBench) -> None:
    async with bench.running() as (driver, link):
        wanted = bench.sandbox("exit-9.x")
        await bench.launch(link, wanted)
        failed = _entry(driver, wanted.id)
        await _launch_over(failed)
        wanted.name, seen = "steady", len(link.events)
        async with failed.lock:
            creating = await _begun(_create(link, wanted))
            clearing = await _begun(driver.lifecycle._provisioner.clear_failed(failed))
        await creating
        await wait_ready_again(link, wanted.id, seen)
        await clearing
        assert _recorded(bench, wanted.id) == RecordPhase.ACTIVE
        assert sorted(_running(bench, wanted.id)) == ["sandbox", "supervisor"]
        await _delete(driver, wanted.id)


async def test_deleting_what_is_left_of_an_id_leaves_alone_the_sandbox_that_takes_it(bench: DriverBench) -> None:
    wrap = _Wrap()
    async with bench.running(wrap=wrap) as (driver, link):
        wanted = bench.sandbox()
        with wrap.engine.hold("list_containers", calls=1) as held:
            deleting = asyncio.create_task(_delete(driver, wanted.id))
            await held.reached.wait()
            with held_saves(driver.services.store, RecordPhase.PROVISIONING) as saving:
                creating = asyncio.create_task(_create(link, wanted))
                with wrap.engine.hold("ping", calls=1) as passed:
                    await passed.reached.wait()
                held.release()
                assert not await deleting
                await saving.reached.wait()
            await creating
        assert ready(await link.wait_ready(wanted.id)).reason == "BackendReady"
        assert _recorded(bench, wanted.id) == RecordPhase.ACTIVE
        await _delete(driver, wanted.id)


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
    assert _recorded(bench, wanted.id) == RecordPhase.STOPPING
    async with (
        driver_process.serving(bench, **{"stop-grace-seconds": "1"}) as process,
        ComputeGateway(address) as link,
    ):
        await link.wait(lambda e: any(c.type == "Suspended" for c in e.sandbox.sandbox.status.conditions))
        assert await _is_stopped(bench, link, wanted.id)
        assert "Warning" not in {event.type for event in link.platform_events(wanted.id)}
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))
        assert await driver_process.end(process) == 0


async def test_a_stop_of_a_launch_without_a_workload_is_completed_later_where_the_engine_refuses(
    bench: DriverBench,
) -> None:
    wrap = _Wrap()
    async with bench.running(wrap=wrap) as (driver, link):
        wanted = bench.sandbox()
        with wrap.engine.hold("create_container", before=True) as creating:
            await link.stub.CreateSandbox(pb.CreateSandboxRequest(sandbox=wanted))
            await creating.reached.wait()
            sandbox = _entry(driver, wanted.id)
            with wrap.engine.failing("list_containers", EngineTimeoutError("too busy"), calls=1):
                code, _ = await refusal(link.stub.StopSandbox(pb.StopSandboxRequest(sandbox_id=wanted.id)))
            assert code is grpc.StatusCode.UNAVAILABLE
        assert _recorded(bench, wanted.id) == RecordPhase.DELETING
        driver.lifecycle.resume(sandbox)
        await _is_gone(bench, driver, link, wanted.id)


@pytest.mark.parametrize("method", ["inspect_container", "stop_container"])
async def test_a_stop_of_a_launch_with_a_workload_is_completed_later_where_the_engine_refuses(
    bench: DriverBench, method: str
) -> None:
    wrap = _Wrap()
    async with bench.running(wrap=wrap) as (driver, link):
        wanted = bench.sandbox("never")
        await link.stub.CreateSandbox(pb.CreateSandboxRequest(sandbox=wanted))
        with wrap.engine.hold("exec_command", calls=1) as probing:
            await probing.reached.wait()
        sandbox, seen = _entry(driver, wanted.id), len(link.events)
        with wrap.engine.failing(method, EngineRefusedError("driver failed"), container=sandbox.record.workload_id):
            await refusal(link.stub.StopSandbox(pb.StopSandboxRequest(sandbox_id=wanted.id)))
        assert _recorded(bench, wanted.id) == RecordPhase.STOPPING
        driver.lifecycle.resume(sandbox)
        await link.wait(lambda e: any(c.type == "Suspended" for c in e.sandbox.sandbox.status.conditions))
        assert await _is_stopped(bench, link, wanted.id)
        told = {ready(e.sandbox.sandbox).status for _, e in link.events[seen:] if e.sandbox.sandbox.id}
        assert told == {"Unknown", "False"}, "it was never ready, and is not told as such"
        assert "Warning" not in {event.type for event in link.platform_events(wanted.id)}
        await _delete(driver, wanted.id)


async def test_a_stop_that_was_begun_is_completed_later_where_the_engine_refuses(bench: DriverBench) -> None:
    wrap = _Wrap()
    async with bench.running(wrap=wrap) as (driver, link):
        wanted = bench.sandbox()
        await bench.launch(link, wanted)
        sandbox = _entry(driver, wanted.id)
        with wrap.engine.failing("stop_container", EngineRefusedError("no"), container=sandbox.record.workload_id):
            await refusal(link.stub.StopSandbox(pb.StopSandboxRequest(sandbox_id=wanted.id)))
        got = await link.stub.GetSandbox(pb.GetSandboxRequest(sandbox_id=wanted.id))
        assert ready(got.sandbox).status == "Unknown", "its supervisor is gone, so it is not ready"
        driver.lifecycle.resume(sandbox)
        await link.wait(lambda e: any(c.type == "Suspended" for c in e.sandbox.sandbox.status.conditions))
        assert await _is_stopped(bench, link, wanted.id)
        await _delete(driver, wanted.id)


async def test_a_stop_takes_a_supervisor_along_whose_creation_was_cut_short(bench: DriverBench) -> None:
    wrap = _Wrap()
    async with bench.running(wrap=wrap) as (driver, link):
        wanted = await _stopped_one(bench, link)
        with wrap.engine.hold("create_container") as made:
            await start(link, wanted.id, "g-2", launch_authentication(generation="g-2"))
            await made.reached.wait()  # it exists, but the driver has not heard its id
            await stop(link, wanted.id)
        assert await _is_stopped(bench, link, wanted.id)
        await _delete(driver, wanted.id)


async def test_a_start_that_comes_while_the_last_one_is_told_as_failed_is_carried_out(bench: DriverBench) -> None:
    async with bench.running() as (driver, link):
        wanted = await _stopped_one(bench, link)
        good = driver.services.config
        with held_saves(driver.services.store, RecordPhase.ACTIVE) as held:
            driver.services.config = good.model_copy(update={"supervisor_image": bench.images.bare})
            await start(link, wanted.id, "g-2", launch_authentication(generation="g-2"))
            await held.reached.wait()
            driver.services.config = good
            seen = len(link.events)
            again = await _begun(_start(driver, wanted.id, "g-3"))
            held.release()
            await again
        await link.wait(lambda e: _is_after(link, seen, e) and "BackendReady" in str(e))
        assert _entry(driver, wanted.id).record.start_generation == "g-3"
        assert [event.type for event in link.platform_events(wanted.id)].count("Warning") == 1
        await _delete(driver, wanted.id)


async def test_a_stop_does_not_swallow_why_the_launch_failed(bench: DriverBench) -> None:
    async with bench.running() as (driver, link):
        wanted = bench.sandbox("exit-9.x")
        with held_saves(driver.services.store, RecordPhase.FAILED) as held:
            await link.stub.CreateSandbox(pb.CreateSandboxRequest(sandbox=wanted))
            await held.reached.wait()
            stopping = await _begun(_stop(driver, wanted.id))
            held.release()
            await stopping
        await link.wait(lambda e: e.platform_event.event.type == "Warning")
        journal = driver.services.journal.read(sandbox_id=wanted.id)
        assert [entry.verdict["openshell.verdict.exit_code"] for entry in journal] == ["9"]
        assert bench.sandbox_left_over(wanted.id) == []
        assert not (_folder(bench, wanted.id) / "supervisor-auth.json").exists()
        await _delete(driver, wanted.id)


async def test_a_ready_that_cannot_be_recorded_is_not_told(bench: DriverBench) -> None:
    async with bench.running() as (driver, link):
        wanted = bench.sandbox()
        with refused_saves(driver.services.store, RecordPhase.ACTIVE):
            observed = await bench.launch(link, wanted)
            assert ready(observed).status == "False"
            assert "No space left" in ready(observed).message
            await _launch_over(_entry(driver, wanted.id))
        assert bench.sandbox_left_over(wanted.id) == []
        assert _recorded(bench, wanted.id) == RecordPhase.FAILED
        await _delete(driver, wanted.id)


async def test_a_stop_that_cannot_be_recorded_is_told_all_the_same_and_recorded_at_a_look(bench: DriverBench) -> None:
    wrap = _Wrap()
    async with bench.running(wrap=wrap, resync_interval_seconds=1) as (driver, link):
        wanted = bench.sandbox()
        await bench.launch(link, wanted)
        with refused_saves(driver.services.store, RecordPhase.STOPPED) as full:
            await stop(link, wanted.id)
            await link.wait(lambda e: any(c.type == "Suspended" for c in e.sandbox.sandbox.status.conditions))
            assert _recorded(bench, wanted.id) == RecordPhase.STOPPING
            full.reached.clear()
            await full.reached.wait()  # a look has tried again
        for _ in range(2):
            with wrap.engine.hold("list_containers", calls=1) as look:
                await look.reached.wait()
        assert _recorded(bench, wanted.id) == RecordPhase.STOPPED
        await _delete(driver, wanted.id)


async def test_an_end_that_a_refused_stop_has_covered_is_told(bench: DriverBench) -> None:
    wrap = _Wrap()
    async with bench.running(wrap=wrap) as (driver, link):
        wanted = bench.sandbox()
        await bench.launch(link, wanted)
        workload = _entry(driver, wanted.id).record.workload_id
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
        await _delete(driver, wanted.id)


async def test_stops_and_starts_leave_nothing_in_memory(bench: DriverBench) -> None:
    async with bench.running() as (driver, link):
        wanted = await _stopped_one(bench, link)
        sandbox = _entry(driver, wanted.id)
        for number in range(2, 5):
            seen, generation = len(link.events), f"g-{number}"
            await start(link, wanted.id, generation, launch_authentication(generation=generation))
            await wait_ready_again(link, wanted.id, seen)
            await stop(link, wanted.id)
        own = {sandbox.record.workload_id}
        assert sandbox.intentional <= own
        assert sandbox.judged <= own
        assert set(sandbox.events) <= own
        await _delete(driver, wanted.id)


async def test_an_outage_while_a_start_is_judged_is_no_failure_of_it(bench: DriverBench) -> None:
    wrap = _Wrap()
    async with bench.running(wrap=wrap) as (driver, link):
        wanted = await _stopped_one(bench, link)
        sandbox = _entry(driver, wanted.id)
        with (
            wrap.engine.hold("exec_command", before=True) as probing,
            wrap.engine.failing("exec_command", EngineAbsentError("gone, it seems")),
        ):
            await start(link, wanted.id, "g-2", launch_authentication(generation="g-2"))
            await probing.reached.wait()
            with wrap.engine.failing("inspect_container", EngineTimeoutError("no answer")):
                probing.release()
                await _launch_over(sandbox)
        assert sandbox.record.phase is RecordPhase.STARTING
        assert "Warning" not in {event.type for event in link.platform_events(wanted.id)}
        seen = len(link.events)
        driver.lifecycle.resume(sandbox)
        await wait_ready_again(link, wanted.id, seen)
        await _delete(driver, wanted.id)
