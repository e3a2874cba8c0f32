"""A real engine that ends and comes back under the driver's sandboxes, with live-restore and without it."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from scripted import driver_process, stub_images
from scripted.compute_gateway import ComputeGateway, launch_authentication, ready
from scripted.driver_bench import DriverBench, make_bench
from scripted.engine_room import EngineRoom, running_room, why_impossible
from scripted.retained import refusal, start, stop, stopped, wait_ready_again

from openshell.verdicts import Component, Verdict
from openshell.wire.compute.v1 import compute_driver_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator

    from docker import APIClient

ENDS = (signal.SIGTERM, signal.SIGKILL)
ROLES = {Component.WORKLOAD: "sandbox", Component.SUPERVISOR: "supervisor"}

pytestmark = pytest.mark.skipif(bool(why_impossible()), reason=why_impossible())


@dataclass(frozen=True, slots=True)
class Place:
    """An engine of the test's own, with the stand-in images on it."""

    room: EngineRoom
    client: APIClient
    bench: DriverBench
    live_restore: bool

    async def end(self, number: signal.Signals) -> None:
        await asyncio.to_thread(self.room.end, number)

    async def start(self) -> None:
        await asyncio.to_thread(self.room.start, live_restore=self.live_restore)

    def state(self, sandbox_id: str, component: Component) -> dict[str, Any]:
        found: dict[str, Any] = self.bench.container(sandbox_id, ROLES[component])["State"]
        return found


@pytest.fixture(scope="module")
def furnished() -> Iterator[tuple[EngineRoom, APIClient, stub_images.StubImages]]:
    import docker

    with running_room() as room:
        room.start(live_restore=True)
        client = docker.APIClient(base_url=room.docker_host, version="auto", timeout=60)
        yield room, client, stub_images.build(client, "room")
        client.close()


@pytest.fixture
def place(
    request: pytest.FixtureRequest, furnished: tuple[EngineRoom, APIClient, stub_images.StubImages]
) -> Iterator[Place]:
    """An engine that runs with live-restore, or without it where the test's parameter says so."""
    room, client, stubs = furnished
    live_restore = getattr(request, "param", True)
    room.end(signal.SIGTERM)
    room.start(live_restore=live_restore)
    bench = make_bench(room.docker_host, client, stubs)
    yield Place(room=room, client=client, bench=bench, live_restore=live_restore)
    room.start(live_restore=live_restore)  # where the test failed in between
    left = bench.left_over()
    bench.clear()
    assert left == []


def _told(link: ComputeGateway, sandbox_id: str, seen: int) -> list[str]:
    """Reasons of the snapshots of a sandbox after those seen so far; `deleted` for its deletion."""
    return [
        ready(event.sandbox.sandbox).reason if event.WhichOneof("payload") == "sandbox" else "deleted"
        for _, event in link.events[seen:]
        if sandbox_id in {event.sandbox.sandbox.id, event.deleted.sandbox_id}
    ]


def _verdicts(link: ComputeGateway, sandbox_id: str) -> list[Verdict]:
    found = [Verdict.from_metadata(event.metadata) for event in link.platform_events(sandbox_id)]
    return [verdict for verdict in found if verdict is not None]


async def _created(link: ComputeGateway, sandbox: pb.DriverSandbox) -> None:
    """Create a sandbox as soon as the driver has found the engine again."""
    while True:
        try:
            await link.stub.CreateSandbox(pb.CreateSandboxRequest(sandbox=sandbox))
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE
        else:
            return


async def _delete(link: ComputeGateway, sandbox_id: str) -> None:
    assert (await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=sandbox_id))).deleted
    await link.wait_deleted(sandbox_id)


@pytest.mark.parametrize("number", ENDS, ids=lambda number: number.name)
async def test_with_live_restore_the_end_of_the_engine_is_no_news(place: Place, number: signal.Signals) -> None:
    bench = place.bench
    async with bench.running() as (_, link):
        wanted = bench.sandbox()
        await bench.launch(link, wanted)
        before = {component: place.state(wanted.id, component) for component in ROLES}
        seen = len(link.events)
        await place.end(number)
        for call in (
            link.stub.GetSandbox(pb.GetSandboxRequest(sandbox_id=wanted.id)),
            link.stub.ListSandboxes(pb.ListSandboxesRequest()),
            link.stub.StopSandbox(pb.StopSandboxRequest(sandbox_id=wanted.id)),
            link.stub.StartSandbox(pb.StartSandboxRequest(sandbox_id=wanted.id, generation_id="g-2")),
            link.stub.CreateSandbox(pb.CreateSandboxRequest(sandbox=bench.sandbox())),
        ):
            code, _ = await refusal(call)
            assert code is grpc.StatusCode.UNAVAILABLE
        assert all(place.room.runs(state["Pid"]) for state in before.values()), "the containers do not need the engine"
        assert link.events[seen:] == []

        await place.start()
        await wait_ready_again(link, wanted.id, seen)
        assert {component: place.state(wanted.id, component) for component in ROLES} == before
        got = await link.stub.GetSandbox(pb.GetSandboxRequest(sandbox_id=wanted.id))
        assert ready(got.sandbox).reason == "BackendReady"
        child = bench.client.exec_create(bench.container(wanted.id, "sandbox")["Id"], ["/bin/echo", "at work"])["Id"]
        assert await asyncio.to_thread(bench.client.exec_start, child) == b"at work\n"
        assert _told(link, wanted.id, seen) == ["BackendReady"], "one fresh snapshot"

        await stop(link, wanted.id)
        assert await stopped(link, wanted.id)
        assert "Warning" not in {event.type for event in link.platform_events(wanted.id)}
        await _delete(link, wanted.id)


@pytest.mark.parametrize("number", ENDS, ids=lambda number: number.name)
@pytest.mark.parametrize(
    ("component", "reason", "code"),
    [(Component.SUPERVISOR, "ControlSupervisorExited", 6), (Component.WORKLOAD, "ContainerExited", 7)],
    ids=lambda value: value.value if isinstance(value, Component) else None,
)
async def test_an_exit_while_the_engine_is_away_is_judged_when_it_is_back(
    place: Place, component: Component, reason: str, code: int, number: signal.Signals
) -> None:
    bench = place.bench
    async with bench.running() as (_, link):
        lost, kept = bench.sandbox("late-6.lost"), bench.sandbox("kept")
        for wanted in (lost, kept):
            await bench.launch(link, wanted)
        seen = len(link.events)
        pid = place.state(lost.id, component)["Pid"]
        await place.end(number)
        await asyncio.to_thread(place.room.signal, pid, signal.SIGUSR1)
        assert link.events[seen:] == []
        await place.start()
        observed = await link.wait_reason(lost.id, reason)
        assert f"code {code}" in ready(observed).message
        (verdict,) = _verdicts(link, lost.id)
        assert (verdict.component, verdict.exit_code) == (component, code)
        await wait_ready_again(link, kept.id, seen)
        assert _told(link, kept.id, seen) == ["BackendReady"]
        for wanted in (lost, kept):
            await _delete(link, wanted.id)


@pytest.mark.parametrize("number", ENDS, ids=lambda number: number.name)
@pytest.mark.parametrize(("moment", "again"), [("Scheduled", False), ("Scheduled", True), ("Created", True)])
async def test_an_engine_that_ends_in_a_launch_costs_that_launch_alone(
    place: Place, number: signal.Signals, moment: str, again: bool
) -> None:
    bench = place.bench
    async with bench.running(resync_interval_seconds=1) as (_, link):
        cut = bench.sandbox("cut")
        await link.stub.CreateSandbox(pb.CreateSandboxRequest(sandbox=cut))
        await link.wait(lambda e: e.platform_event.event.reason == moment)
        await place.end(number)
        observed = await link.wait_ready(cut.id)
        await place.start()
        if again and ready(observed).reason != "BackendReady":  # it may have been faster than the engine's end
            first = next(event for _, event in link.events if event.platform_event.event.reason == "Scheduled")
            await asyncio.wait_for(_created(link, cut), 30)
            entry = await link.wait(lambda e: e.platform_event.event.reason == "Scheduled" and e is not first)
            seen = link.events.index(entry)
            await wait_ready_again(link, cut.id, seen)
        await _delete(link, cut.id)
    # The fixture sees that nothing is left once the driver has ended.


@pytest.mark.slow  # the engine takes a quarter of a minute to find its containerd again
@pytest.mark.parametrize(("component", "code"), [(Component.SUPERVISOR, 6), (Component.WORKLOAD, 7)])
async def test_field_report_54_an_exit_while_containerd_is_away_is_judged(
    place: Place, component: Component, code: int
) -> None:
    bench = place.bench
    async with bench.running(resync_interval_seconds=1) as (_, link):
        lost = bench.sandbox("late-6.lost")
        await bench.launch(link, lost)
        pid = place.state(lost.id, component)["Pid"]
        await asyncio.to_thread(place.room.kill_containerd)
        await asyncio.to_thread(place.room.signal, pid, signal.SIGUSR1)
        _, event = await link.wait(lambda e: e.platform_event.event.type == "Warning", seconds=60)
        verdict = Verdict.from_metadata(event.platform_event.event.metadata)
        assert verdict is not None
        assert (verdict.component, verdict.exit_code) == (component, code)
        await _delete(link, lost.id)


@pytest.mark.parametrize("place", [False], indirect=True, ids=["without live-restore"])
@pytest.mark.parametrize("number", ENDS, ids=lambda number: number.name)
async def test_without_live_restore_both_end_and_a_start_brings_the_sandbox_back(
    place: Place, number: signal.Signals
) -> None:
    bench = place.bench
    async with bench.running() as (_, link):
        wanted = bench.sandbox()
        await bench.launch(link, wanted)
        workload = bench.container(wanted.id, "sandbox")
        seen = len(link.events)
        await place.end(number)
        await place.start()
        observed = await link.wait_reason(wanted.id, "ContainerRuntimeRestart")
        assert "143" in ready(observed).message
        (verdict,) = _verdicts(link, wanted.id)
        assert (verdict.component, verdict.exit_code, verdict.signal) == (Component.WORKLOAD, 143, "SIGTERM")
        await start(link, wanted.id, "g-2", launch_authentication(generation="g-2"))
        await wait_ready_again(link, wanted.id, seen, failed_before=True)
        assert set(_told(link, wanted.id, seen)) == {"ContainerRuntimeRestart", "Starting", "BackendReady"}
        assert _verdicts(link, wanted.id) == [verdict]
        now = bench.container(wanted.id, "sandbox")
        assert now["Id"] == workload["Id"]
        assert now["State"]["StartedAt"] > workload["State"]["StartedAt"]
        got = await link.stub.GetSandbox(pb.GetSandboxRequest(sandbox_id=wanted.id))
        assert ready(got.sandbox).reason == "BackendReady"
        await _delete(link, wanted.id)


@pytest.mark.parametrize("place", [True, False], indirect=True, ids=["live-restore", "without live-restore"])
async def test_after_a_reset_of_the_machine_a_start_brings_the_sandbox_back(place: Place) -> None:
    bench = place.bench
    wanted = await driver_process.launched_and_killed(bench)
    await asyncio.to_thread(place.room.cut_power)
    await place.start()
    async with (
        driver_process.serving(bench) as process,
        ComputeGateway(f"unix:{driver_process.socket_of(bench)}") as link,
    ):
        observed = await link.wait_reason(wanted.id, "ContainerRuntimeRestart")
        assert "255" in ready(observed).message, "the engine's word for an end that nobody could tell it"
        assert "ControlSupervisorExited" not in _told(link, wanted.id, 0)
        await start(link, wanted.id, "g-2", launch_authentication(generation="g-2"))
        await wait_ready_again(link, wanted.id, 0, failed_before=True)
        await _delete(link, wanted.id)
        assert await driver_process.end(process) == 0
