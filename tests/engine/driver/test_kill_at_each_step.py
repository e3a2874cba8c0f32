"""A driver killed at every step of a verb: nothing is lost, nothing leaks, nothing runs twice.

A step is a change that the driver asks of the engine, or a write to its state folder; it is killed right before it and
right after it. Generated: each test kills at the first step, then at the second, until the verb gets through.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import pytest
from scripted import driver_process
from scripted.compute_gateway import ComputeGateway, launch_authentication, ready
from scripted.disk_trap import PRELUDE, DiskTrap
from scripted.engine_proxy import EngineProxy, Moment, Trap
from scripted.retained import refreshed, start, stop, stopped, wait_ready_again

from driver_docker.records import RECORD_FILE
from openshell.isolation.documents import LaunchAuthentication
from openshell.wire.compute.v1 import compute_driver_pb2 as pb

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import AsyncIterator, Callable, Coroutine

    from scripted.driver_bench import DriverBench

pytestmark = pytest.mark.slow


class Step(StrEnum):
    """Where a driver is killed."""

    BEFORE_CHANGE = "before-change"
    AFTER_CHANGE = "after-change"
    BEFORE_WRITE = "before-write"
    AFTER_WRITE = "after-write"


STEPS = pytest.mark.parametrize("step", Step, ids=str)
LIMIT = 40
"""More changes than any verb asks for: a loop that gets there does not come to an end."""


@dataclass
class Run:
    """One driver after the other on one bench, each behind the proxy."""

    bench: DriverBench
    proxy: EngineProxy
    stack: AsyncExitStack
    process: Process
    link: ComputeGateway
    disk: DiskTrap
    kills: list[str] = field(default_factory=list)

    async def renew(self) -> None:
        """The next driver."""
        await self.stack.aclose()
        self.process, self.link = await _come_up(self.bench, self.proxy, self.stack, self.disk)

    def set_trap(self, number: int, step: Step) -> None:
        """Have the driver killed at the n-th step from now."""
        if step in {Step.BEFORE_WRITE, Step.AFTER_WRITE}:
            self.disk.set(number, after=step is Step.AFTER_WRITE)
        else:
            moment = Moment.BEFORE if step is Step.BEFORE_CHANGE else Moment.AFTER
            self.proxy.trap = Trap(self.process.pid, number, moment)

    def clear_trap(self) -> str:
        """What the driver was killed at, or nothing; no trap is set any more."""
        trap, self.proxy.trap = self.proxy.trap, None
        return (trap.sprung if trap is not None else "") or self.disk.clear()

    async def is_killed_in(self, verb: Coroutine[None, None, None], number: int, step: Step) -> bool:
        """Whether the driver was killed at the n-th step before the verb was done; the next driver is up then."""
        self.set_trap(number, step)
        done = asyncio.create_task(verb)
        died = asyncio.create_task(self.process.wait())
        await asyncio.wait({done, died}, return_when=asyncio.FIRST_COMPLETED, timeout=30)
        if step in {Step.BEFORE_WRITE, Step.AFTER_WRITE}:
            # The last write follows the news that the verb is done.
            await asyncio.wait({died}, timeout=0.5)
        sprung = self.clear_trap()
        if not sprung:
            died.cancel()
            await done
            return False
        await died
        done.cancel()
        await asyncio.gather(done, return_exceptions=True)
        self.kills.append(sprung)
        await self.renew()
        return True

    async def each_kill(self, verb: Callable[[], Coroutine[None, None, None]], step: Step) -> AsyncIterator[None]:
        """After each kill, until the verb has come through."""
        for number in range(1, LIMIT):
            if not await self.is_killed_in(verb(), number, step):
                assert number > 1, "the verb asks for no change at all"
                return
            yield
        raise AssertionError(self.kills)


async def _come_up(
    bench: DriverBench, proxy: EngineProxy, stack: AsyncExitStack, disk: DiskTrap
) -> tuple[Process, ComputeGateway]:
    process = await stack.enter_async_context(
        driver_process.serving(
            bench,
            driver_process.Setup(environment=disk.environment, prelude=PRELUDE),
            **{"docker-socket": str(proxy.path)},
        )
    )
    link = await stack.enter_async_context(ComputeGateway(f"unix:{driver_process.socket_of(bench)}"))
    return process, link


@asynccontextmanager
async def _running(bench: DriverBench) -> AsyncIterator[Run]:
    async with EngineProxy.between(bench.folder / "e.sock", bench.docker_host) as proxy, AsyncExitStack() as stack:
        disk = DiskTrap(bench.folder / "trap")
        process, link = await _come_up(bench, proxy, stack, disk)
        run = Run(bench, proxy, stack, process, link, disk)
        yield run
        assert await driver_process.end(run.process) == 0


async def _settled(link: ComputeGateway, sandbox_id: str) -> pb.DriverCondition:
    """Where a sandbox comes to rest: its first Ready condition that is neither starting nor stopping."""

    def rests(event: pb.WatchSandboxesEvent) -> bool:
        if event.WhichOneof("payload") != "sandbox" or event.sandbox.sandbox.id != sandbox_id:
            return False
        shown = ready(event.sandbox.sandbox)
        return shown.reason != "Starting" and (shown.status, shown.reason) != ("Unknown", "ContainerStopped")

    _, event = await link.wait(rests)
    return ready(event.sandbox.sandbox)


def _workload(bench: DriverBench, sandbox_id: str) -> tuple[str, str]:
    found = bench.container(sandbox_id, "sandbox")
    return found["Id"], found["State"]["StartedAt"]


async def _delete(link: ComputeGateway, sandbox_id: str) -> None:
    await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=sandbox_id))


@STEPS
async def test_create(bench: DriverBench, step: Step) -> None:
    async with _running(bench) as run:
        wanted = bench.sandbox()
        accepted = told_ready = False

        async def create() -> None:
            nonlocal accepted, told_ready, wanted
            accepted = told_ready = False
            wanted = bench.sandbox()
            await run.link.stub.CreateSandbox(pb.CreateSandboxRequest(sandbox=wanted))
            accepted = True
            assert ready(await run.link.wait_ready(wanted.id)).reason == "BackendReady"
            told_ready = True

        async for _ in run.each_kill(create, step):
            listed = await run.link.stub.ListSandboxes(pb.ListSandboxesRequest())
            known = {entry.id: ready(entry) for entry in listed.sandboxes}
            assert wanted.id in known or not accepted, "an accepted sandbox is never forgotten"
            assert not told_ready or known[wanted.id].reason == "BackendReady", "what was told is not taken back"
            for sandbox_id, shown in known.items():
                if shown.reason == "BackendReady":
                    assert bench.container(sandbox_id, "supervisor")["State"]["Running"]
                else:
                    assert "the driver ended" in shown.message
                    assert bench.sandbox_left_over(sandbox_id) == []
                    left = {file.name for file in (bench.folder / "state" / bench.namespace / sandbox_id).iterdir()}
                    left = {name for name in left if not name.startswith(f".{RECORD_FILE}.")}  # being written just now
                    assert left == {RECORD_FILE}, "no secret of a launch that was cut stays"
                await _delete(run.link, sandbox_id)
            assert bench.sandbox_left_over(wanted.id) == []
        await _delete(run.link, wanted.id)
        assert len(run.kills) >= 5, run.kills


@STEPS
async def test_stop(bench: DriverBench, step: Step) -> None:
    async with _running(bench) as run:
        wanted = bench.sandbox()
        await bench.launch(run.link, wanted)
        generations = (f"g-{number}" for number in range(2, LIMIT))

        async for _ in run.each_kill(lambda: stop(run.link, wanted.id), step):
            shown = await _settled(run.link, wanted.id)
            assert shown.reason in {"ContainerStopped", "BackendReady"}, shown
            await stop(run.link, wanted.id)
            assert await stopped(run.link, wanted.id)
            assert "Warning" not in {event.type for event in run.link.platform_events(wanted.id)}
            seen, generation = len(run.link.events), next(generations)
            await start(run.link, wanted.id, generation, launch_authentication(generation=generation))
            await wait_ready_again(run.link, wanted.id, seen)
        assert await stopped(run.link, wanted.id)
        await _delete(run.link, wanted.id)
        assert len(run.kills) >= 2, run.kills


@STEPS
async def test_start(bench: DriverBench, step: Step) -> None:
    async with _running(bench) as run:
        wanted = bench.sandbox()
        await bench.launch(run.link, wanted)
        await stop(run.link, wanted.id)
        launch = launch_authentication(generation="g-2")

        async def start_it() -> None:
            seen = len(run.link.events)
            await start(run.link, wanted.id, launch.supervisor.runtime_generation, launch)
            await wait_ready_again(run.link, wanted.id, seen)

        async for _ in run.each_kill(start_it, step):
            shown = await _settled(run.link, wanted.id)
            assert shown.reason in {"ContainerStopped", "BackendReady"}, shown
            before = _workload(bench, wanted.id)
            await start(run.link, wanted.id, launch.supervisor.runtime_generation, launch)
            await _until_ready(run.link, wanted.id)
            if shown.reason == "BackendReady":
                assert _workload(bench, wanted.id) == before, "a retry does not run the workload twice"
            assert "Warning" not in {event.type for event in run.link.platform_events(wanted.id)}
            await stop(run.link, wanted.id)
            launch = launch_authentication(generation=f"g-{len(run.kills) + 2}")
        await _delete(run.link, wanted.id)
        assert len(run.kills) >= 6, run.kills


@STEPS
async def test_replacing_a_supervisor(bench: DriverBench, step: Step) -> None:
    async with _running(bench) as run:
        wanted = bench.sandbox()
        await bench.launch(run.link, wanted)
        workload = _workload(bench, wanted.id)
        launch = LaunchAuthentication.from_json(wanted.spec.launch_authentication)

        async def replace_it() -> None:
            nonlocal launch
            seen, launch = len(run.link.events), refreshed(launch)
            await start(run.link, wanted.id, "first", launch)
            await wait_ready_again(run.link, wanted.id, seen)

        async for _ in run.each_kill(replace_it, step):
            assert (await _settled(run.link, wanted.id)).reason == "BackendReady"
            assert _workload(bench, wanted.id) == workload
            assert bench.container(wanted.id, "supervisor")["State"]["Running"]
        assert _workload(bench, wanted.id) == workload
        await _delete(run.link, wanted.id)
        assert len(run.kills) >= 2, run.kills


@STEPS
async def test_delete(bench: DriverBench, step: Step) -> None:
    async with _running(bench) as run:
        wanted = bench.sandbox()
        await bench.launch(run.link, wanted)

        async def delete_it() -> None:
            await _delete(run.link, wanted.id)

        async for _ in run.each_kill(delete_it, step):
            listed = await run.link.stub.ListSandboxes(pb.ListSandboxesRequest())
            assert [entry.id for entry in listed.sandboxes] in ([], [wanted.id])
            await _delete(run.link, wanted.id)
            assert bench.sandbox_left_over(wanted.id) == []
            wanted = bench.sandbox()
            await bench.launch(run.link, wanted)
        assert len(run.kills) >= 2, run.kills


async def _until_ready(link: ComputeGateway, sandbox_id: str) -> None:
    """Until the newest snapshot says ready."""

    seen = len(link.events)
    got = await link.stub.GetSandbox(pb.GetSandboxRequest(sandbox_id=sandbox_id))
    if ready(got.sandbox).reason != "BackendReady":
        await wait_ready_again(link, sandbox_id, seen)
