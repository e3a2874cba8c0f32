"""Verbs that meet each other, a launch or a look: one acts at a time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from scripted.compute_gateway import launch_authentication, ready
from scripted.inside import (
    Wrap,
    ask_create,
    ask_delete,
    ask_start,
    ask_stop,
    begun,
    check_gone,
    entry_of,
    folder_of,
    is_after,
    is_stopped,
    launch_over,
    recorded,
    running_roles,
    stopped_one,
)
from scripted.retained import refusal, start, stop, wait_ready_again
from scripted.scripted_store import held_saves

from driver_docker.engine import EngineUnreachableError
from driver_docker.errors import PreconditionError
from driver_docker.sandbox_record import RecordPhase

if TYPE_CHECKING:
    from scripted.compute_gateway import ComputeGateway
    from scripted.driver_bench import DriverBench

    from driver_docker.sandboxes import Sandbox
    from driver_docker.serve import Driver
    from openshell.wire.compute.v1 import compute_driver_pb2 as pb


async def test_a_stop_that_comes_while_a_start_is_accepted_stops_what_it_began(bench: DriverBench) -> None:
    wrap = Wrap()
    async with bench.running(wrap=wrap) as (driver, link):
        wanted = await stopped_one(bench, link)
        with wrap.engine.hold("inspect_container", calls=1) as held:
            starting = asyncio.create_task(start(link, wanted.id, "g-2", launch_authentication(generation="g-2")))
            await held.reached.wait()
            stopping = await begun(ask_stop(driver, wanted.id))
            held.release()
            await asyncio.gather(starting, stopping)
        await launch_over(entry_of(driver, wanted.id))
        assert await is_stopped(bench, link, wanted.id)
        await ask_delete(driver, wanted.id)


async def test_a_delete_that_comes_while_a_start_is_accepted_leaves_nothing(bench: DriverBench) -> None:
    wrap = Wrap()
    async with bench.running(wrap=wrap) as (driver, link):
        wanted = await stopped_one(bench, link)
        sandbox = entry_of(driver, wanted.id)
        with (
            wrap.engine.hold("inspect_container", calls=1) as held,
            wrap.engine.hold("list_containers", calls=1) as listed,
        ):
            starting = asyncio.create_task(start(link, wanted.id, "g-2", launch_authentication(generation="g-2")))
            await held.reached.wait()
            deleting = await begun(ask_delete(driver, wanted.id))
            held.release()
            await starting
            await listed.reached.wait()  # what is not there by now is not removed
            await launch_over(sandbox)
            listed.release()
            assert await deleting
        await check_gone(bench, driver, link, wanted.id)


async def test_a_look_in_the_middle_of_a_stop_does_not_go_on_with_the_start(bench: DriverBench) -> None:
    wrap = Wrap()
    async with bench.running(wrap=wrap) as (driver, link):
        wanted = await stopped_one(bench, link)
        sandbox = entry_of(driver, wanted.id)
        with wrap.engine.failing("put_archive", EngineUnreachableError("away"), calls=1):
            await start(link, wanted.id, "g-2", launch_authentication(generation="g-2"))
            await launch_over(sandbox)  # it goes on when the engine answers again
        assert sandbox.record.phase is RecordPhase.STARTING
        with wrap.engine.hold("inspect_container", calls=1) as held:
            stopping = asyncio.create_task(stop(link, wanted.id))
            await held.reached.wait()
            driver.lifecycle.resume(sandbox)
            held.release()
            await stopping
        await launch_over(sandbox)
        assert await is_stopped(bench, link, wanted.id)
        await ask_delete(driver, wanted.id)


@pytest.mark.parametrize("verb", [ask_stop, ask_delete])
async def test_a_verb_that_comes_while_a_create_is_reserved_ends_the_launch(bench: DriverBench, verb: Any) -> None:
    async with bench.running() as (driver, link):
        wanted = bench.sandbox()
        with held_saves(driver.services.store, RecordPhase.PROVISIONING) as held:
            creating = asyncio.create_task(ask_create(link, wanted))
            await held.reached.wait()
            sandbox = entry_of(driver, wanted.id)
            ending = await begun(verb(driver, wanted.id))
            held.release()
            await asyncio.gather(creating, ending)
        await launch_over(sandbox)
        await check_gone(bench, driver, link, wanted.id)


async def _failed_one(bench: DriverBench, driver: Driver, link: ComputeGateway) -> tuple[pb.DriverSandbox, Sandbox]:
    """A sandbox whose launch failed, which will not fail when it is created again."""
    wanted = bench.sandbox("exit-9.x")
    await bench.launch(link, wanted)
    failed = entry_of(driver, wanted.id)
    await launch_over(failed)
    wanted.name = "steady"
    return wanted, failed


async def _awaited(lock: asyncio.Lock, or_done: asyncio.Task[Any]) -> None:
    """Until a task waits for a lock, or is done without it."""
    async with asyncio.timeout(20):
        while not lock._waiters and not or_done.done():  # noqa: ASYNC110 - a lock tells nobody who waits for it
            await asyncio.sleep(0.01)


async def test_two_creates_of_a_failed_id_are_one_launch(bench: DriverBench) -> None:
    wrap = Wrap()
    async with bench.running(wrap=wrap) as (driver, link):
        wanted, failed = await _failed_one(bench, driver, link)
        seen = len(link.events)
        with wrap.engine.hold("list_containers", calls=1) as held:
            first = asyncio.create_task(ask_create(link, wanted))
            await held.reached.wait()
            second = asyncio.create_task(ask_create(link, wanted))
            await _awaited(failed.lock, second)
            with wrap.engine.hold("list_containers", before=True, calls=1):
                held.release()
                await first
                await wait_ready_again(link, wanted.id, seen, failed_before=True)
        code, _ = await refusal(second)
        assert code is grpc.StatusCode.ALREADY_EXISTS
        assert sorted(running_roles(bench, wanted.id)) == ["sandbox", "supervisor"]
        assert (folder_of(bench, wanted.id) / "supervisor-auth.json").exists()
        await ask_delete(driver, wanted.id)


async def test_clearing_a_failed_launch_leaves_alone_the_sandbox_that_has_taken_its_id(bench: DriverBench) -> None:
    wrap = Wrap()
    async with bench.running(wrap=wrap) as (driver, link):
        wanted, failed = await _failed_one(bench, driver, link)
        seen = len(link.events)
        with wrap.engine.hold("list_containers", calls=1) as held:
            creating = asyncio.create_task(ask_create(link, wanted))
            await held.reached.wait()
            clearing = await begun(driver.lifecycle._provisioner.clear_failed(failed))
            with wrap.engine.hold("list_containers", before=True, calls=1):
                held.release()
                await creating
                await wait_ready_again(link, wanted.id, seen, failed_before=True)
            await clearing
        assert recorded(bench, wanted.id) == RecordPhase.ACTIVE
        assert sorted(running_roles(bench, wanted.id)) == ["sandbox", "supervisor"]
        await ask_delete(driver, wanted.id)


async def test_deleting_what_is_left_of_an_id_leaves_alone_the_sandbox_that_takes_it(bench: DriverBench) -> None:
    wrap = Wrap()
    async with bench.running(wrap=wrap) as (driver, link):
        wanted = bench.sandbox()
        with wrap.engine.hold("list_volumes", before=True, calls=1) as held:
            deleting = asyncio.create_task(ask_delete(driver, wanted.id))
            await held.reached.wait()
            creating = asyncio.create_task(ask_create(link, wanted))
            await _awaited(driver.services.table.lock_of(wanted.id), creating)
            if (sandbox := driver.services.table.by_id(wanted.id)) is not None:
                await launch_over(sandbox)
            held.release()
            assert not await deleting
        await creating
        assert ready(await link.wait_ready(wanted.id)).reason == "BackendReady"
        assert recorded(bench, wanted.id) == RecordPhase.ACTIVE
        assert sorted(running_roles(bench, wanted.id)) == ["sandbox", "supervisor"]
        await ask_delete(driver, wanted.id)


async def test_a_start_that_comes_while_the_last_one_is_told_as_failed_is_carried_out(bench: DriverBench) -> None:
    async with bench.running() as (driver, link):
        wanted = await stopped_one(bench, link)
        good = driver.services.config
        with held_saves(driver.services.store, RecordPhase.ACTIVE) as held:
            driver.services.config = good.model_copy(update={"supervisor_image": bench.images.bare})
            await start(link, wanted.id, "g-2", launch_authentication(generation="g-2"))
            await held.reached.wait()
            driver.services.config = good
            seen = len(link.events)
            again = await begun(ask_start(driver, wanted.id, "g-3"))
            held.release()
            await again
        await link.wait(lambda e: is_after(link, seen, e) and "BackendReady" in str(e))
        assert entry_of(driver, wanted.id).record.start_generation == "g-3"
        assert [event.type for event in link.platform_events(wanted.id)].count("Warning") == 1
        await ask_delete(driver, wanted.id)


async def test_a_refused_start_leaves_no_container_of_the_failed_one_behind(bench: DriverBench) -> None:
    async with bench.running() as (driver, link):
        wanted = await stopped_one(bench, link)
        sandbox, good = entry_of(driver, wanted.id), driver.services.config
        with (
            held_saves(driver.services.store, RecordPhase.ACTIVE) as held,
            pytest.MonkeyPatch.context() as upgraded,
        ):
            driver.services.config = good.model_copy(update={"supervisor_image": bench.images.bare})
            await start(link, wanted.id, "g-2", launch_authentication(generation="g-2"))
            await held.reached.wait()
            upgraded.setattr(driver.services.gate, "admit_again", _refuse)
            again = await begun(ask_start(driver, wanted.id, "g-3"))
            held.release()
            with pytest.raises(PreconditionError, match="no longer fit"):
                await again
        await launch_over(sandbox)
        assert running_roles(bench, wanted.id) == []
        assert sandbox.record.failure is not None
        await ask_delete(driver, wanted.id)


async def _refuse(_: object) -> None:
    raise PreconditionError("the revisions no longer fit")


async def test_a_stop_does_not_swallow_why_the_launch_failed(bench: DriverBench) -> None:
    async with bench.running() as (driver, link):
        wanted = bench.sandbox("exit-9.x")
        with held_saves(driver.services.store, RecordPhase.FAILED) as held:
            await ask_create(link, wanted)
            await held.reached.wait()
            stopping = await begun(ask_stop(driver, wanted.id))
            held.release()
            await stopping
        await link.wait(lambda e: e.platform_event.event.type == "Warning")
        journal = driver.services.journal.read(of=wanted.id)
        assert [entry.verdict["openshell.verdict.exit_code"] for entry in journal] == ["9"]
        assert bench.sandbox_left_over(wanted.id) == []
        assert not (folder_of(bench, wanted.id) / "supervisor-auth.json").exists()
        await ask_delete(driver, wanted.id)
