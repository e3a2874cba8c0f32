"""A driver killed at every change that a verb asks of the engine: nothing is lost, nothing leaks, nothing runs twice.

Generated: each test kills the driver at the first change, then at the second, and so on, until the verb gets through.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from scripted import driver_process
from scripted.compute_gateway import ComputeGateway, launch_authentication, ready
from scripted.engine_proxy import EngineProxy, Moment, Trap
from scripted.retained import refreshed, start, stop, stopped, wait_ready_again

from openshell.isolation.documents import LaunchAuthentication
from openshell.wire.compute.v1 import compute_driver_pb2 as pb

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import AsyncIterator, Callable, Coroutine

    from scripted.driver_bench import DriverBench

pytestmark = pytest.mark.slow
MOMENTS = pytest.mark.parametrize("moment", Moment, ids=lambda moment: moment.value)
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
    kills: list[str] = field(default_factory=list)

    async def renew(self) -> None:
        """The next driver."""
        self.proxy.trap = None
        await self.stack.aclose()
        self.process, self.link = await _come_up(self.bench, self.proxy, self.stack)

    async def is_killed_in(self, verb: Coroutine[None, None, None], number: int, moment: Moment) -> bool:
        """Whether the driver was killed at the n-th change before the verb was done; the next driver is up then."""
        self.proxy.trap = trap = Trap(self.process.pid, number, moment)
        done = asyncio.create_task(verb)
        died = asyncio.create_task(self.process.wait())
        await asyncio.wait({done, died}, return_when=asyncio.FIRST_COMPLETED, timeout=30)
        if not trap.sprung:
            died.cancel()
            self.proxy.trap = None
            await done
            return False
        await died
        done.cancel()
        await asyncio.gather(done, return_exceptions=True)
        self.kills.append(trap.sprung)
        await self.renew()
        return True

    async def each_kill(self, verb: Callable[[], Coroutine[None, None, None]], moment: Moment) -> AsyncIterator[None]:
        """After each kill, until the verb has come through."""
        for number in range(1, LIMIT):
            if not await self.is_killed_in(verb(), number, moment):
                assert number > 1, "the verb asks for no change at all"
                return
            yield
        raise AssertionError(self.kills)


async def _come_up(bench: DriverBench, proxy: EngineProxy, stack: AsyncExitStack) -> tuple[Process, ComputeGateway]:
    process = await stack.enter_async_context(driver_process.serving(bench, **{"docker-socket": str(proxy.path)}))
    link = await stack.enter_async_context(ComputeGateway(f"unix:{driver_process.socket_of(bench)}"))
    return process, link


@asynccontextmanager
async def _running(bench: DriverBench) -> AsyncIterator[Run]:
    async with EngineProxy.between(bench.folder / "e.sock", bench.docker_host) as proxy, AsyncExitStack() as stack:
        process, link = await _come_up(bench, proxy, stack)
        run = Run(bench, proxy, stack, process, link)
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


@MOMENTS
async def test_create(bench: DriverBench, moment: Moment) -> None:
    async with _running(bench) as run:
        wanted = bench.sandbox()
        accepted = False

        async def create() -> None:
            nonlocal accepted, wanted
            accepted, wanted = False, bench.sandbox()
            await run.link.stub.CreateSandbox(pb.CreateSandboxRequest(sandbox=wanted))
            accepted = True
            assert ready(await run.link.wait_ready(wanted.id)).reason == "BackendReady"

        async for _ in run.each_kill(create, moment):
            listed = await run.link.stub.ListSandboxes(pb.ListSandboxesRequest())
            known = {entry.id: ready(entry) for entry in listed.sandboxes}
            assert wanted.id in known or not accepted, "an accepted sandbox is never forgotten"
            for sandbox_id, shown in known.items():
                if shown.reason == "BackendReady":
                    assert bench.container(sandbox_id, "supervisor")["State"]["Running"]
                else:
                    assert "the driver ended" in shown.message
                    assert bench.sandbox_left_over(sandbox_id) == []
                await _delete(run.link, sandbox_id)
            assert bench.sandbox_left_over(wanted.id) == []
        await _delete(run.link, wanted.id)
        assert len(run.kills) >= 8, run.kills


@MOMENTS
async def test_stop(bench: DriverBench, moment: Moment) -> None:
    async with _running(bench) as run:
        wanted = bench.sandbox()
        await bench.launch(run.link, wanted)
        generations = (f"g-{number}" for number in range(2, LIMIT))

        async for _ in run.each_kill(lambda: stop(run.link, wanted.id), moment):
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
        assert len(run.kills) >= 3, run.kills


@MOMENTS
async def test_start(bench: DriverBench, moment: Moment) -> None:
    async with _running(bench) as run:
        wanted = bench.sandbox()
        await bench.launch(run.link, wanted)
        await stop(run.link, wanted.id)
        launch = launch_authentication(generation="g-2")

        async def start_it() -> None:
            seen = len(run.link.events)
            await start(run.link, wanted.id, launch.supervisor.runtime_generation, launch)
            await wait_ready_again(run.link, wanted.id, seen)

        async for _ in run.each_kill(start_it, moment):
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


@MOMENTS
async def test_replacing_a_supervisor(bench: DriverBench, moment: Moment) -> None:
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

        async for _ in run.each_kill(replace_it, moment):
            assert (await _settled(run.link, wanted.id)).reason == "BackendReady"
            assert _workload(bench, wanted.id) == workload
            assert bench.container(wanted.id, "supervisor")["State"]["Running"]
        assert _workload(bench, wanted.id) == workload
        await _delete(run.link, wanted.id)
        assert len(run.kills) >= 4, run.kills


@MOMENTS
async def test_delete(bench: DriverBench, moment: Moment) -> None:
    async with _running(bench) as run:
        wanted = bench.sandbox()
        await bench.launch(run.link, wanted)

        async def delete_it() -> None:
            await _delete(run.link, wanted.id)

        async for _ in run.each_kill(delete_it, moment):
            listed = await run.link.stub.ListSandboxes(pb.ListSandboxesRequest())
            assert [entry.id for entry in listed.sandboxes] in ([], [wanted.id])
            await _delete(run.link, wanted.id)
            assert bench.sandbox_left_over(wanted.id) == []
            wanted = bench.sandbox()
            await bench.launch(run.link, wanted)
        assert len(run.kills) >= 4, run.kills


async def _until_ready(link: ComputeGateway, sandbox_id: str) -> None:
    """Until the newest snapshot says ready."""

    seen = len(link.events)
    got = await link.stub.GetSandbox(pb.GetSandboxRequest(sandbox_id=sandbox_id))
    if ready(got.sandbox).reason != "BackendReady":
        await wait_ready_again(link, sandbox_id, seen)
