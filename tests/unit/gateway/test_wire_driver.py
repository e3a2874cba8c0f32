"""What the gateway makes of what its compute driver says and does."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from scripted.compute_driver import ScriptedDriver, condition
from scripted.gateway_bench import GatewayBench, read, ready, rest

from gateway_embedded.admission import REJECTED_TEXT
from gateway_embedded.app import Gateway
from gateway_embedded.config import Deadlines, DriverTimings, GatewayConfig
from gateway_embedded.errors import ConfigurationError, DriverCallError, HandshakeError
from openshell.verdicts import Verdict, VerdictKind
from openshell.wire.compute.v1 import compute_driver_pb2
from openshell.wire.v1 import openshell_pb2 as pb

VERDICT_METADATA = {
    "openshell.verdict.kind": "killed_through_engine",
    "openshell.verdict.reason": "ControlSupervisorExited",
    "openshell.verdict.component": "supervisor",
    "openshell.verdict.exit_code": "137",
    "openshell.verdict.signal": "SIGKILL",
    "openshell.verdict.killed_by": "engine_client",
    "openshell.verdict.future_key": "kept though nobody knows it",
}
MESSAGE = "control supervisor was killed through the engine: SIGKILL (exit code 137)"


def verdict_event() -> compute_driver_pb2.DriverPlatformEvent:
    event = compute_driver_pb2.DriverPlatformEvent(
        source="docker", type="Warning", reason="ControlSupervisorExited", message=MESSAGE, metadata=VERDICT_METADATA
    )
    event.event_time.FromDatetime(datetime(2026, 10, 1, tzinfo=UTC))
    return event


async def tail(bench: GatewayBench, count: int = 50) -> list[pb.PlatformEvent]:
    """The kept events of the sandbox."""
    watch = bench.watch(event_tail=count)
    events: list[pb.PlatformEvent] = []
    first = await read(watch)
    assert first.WhichOneof("payload") == "sandbox"
    head = int(first.cursor.rpartition("-")[2])
    for event in await rest(watch):
        if event.WhichOneof("payload") == "event":
            events.append(event.event)
            assert int(event.cursor.rpartition("-")[2]) > head
    return events


async def test_a_watch_that_follows_nothing_ends_after_the_past(bench: GatewayBench) -> None:
    sandbox, _ = await bench.ready()
    bench.driver.event(sandbox.metadata.id, verdict_event())
    live = bench.watch(follow_events=True, event_tail=1)
    seen = [await live.read(), await live.read()]
    live.cancel()
    async with asyncio.timeout(10):
        past: list[Any] = [event async for event in bench.watch(event_tail=1)]
    assert [event.WhichOneof("payload") for event in past] == ["sandbox", "event"]
    assert past[1] == seen[1]


async def test_a_supervisors_exit_is_an_error_in_the_drivers_own_words(bench: GatewayBench) -> None:
    sandbox, supervisor = await bench.ready()
    watch = bench.watch(follow_status=True, follow_events=True)
    await read(watch)
    bench.driver.snapshot(sandbox.metadata.id, condition("False", "ControlSupervisorExited", MESSAGE))
    bench.driver.event(sandbox.metadata.id, verdict_event())
    status = await read(watch)
    event = await read(watch)
    watch.cancel()
    assert status.sandbox.status.phase == pb.SANDBOX_PHASE_ERROR
    assert (ready(status.sandbox).reason, ready(status.sandbox).message) == ("ControlSupervisorExited", MESSAGE)
    assert (event.event.type, event.event.reason, event.event.message) == (
        "Warning", "ControlSupervisorExited", MESSAGE
    )  # fmt: skip
    assert dict(event.event.metadata) == VERDICT_METADATA
    assert event.event.event_time.ToDatetime(tzinfo=UTC) == datetime(2026, 10, 1, tzinfo=UTC)
    verdict = Verdict.from_metadata(event.event.metadata)
    assert verdict is not None
    assert (verdict.kind, verdict.exit_code, verdict.signal) == (VerdictKind.KILLED_THROUGH_ENGINE, 137, "SIGKILL")
    # Neither the end of the session nor a late observation changes it.
    await supervisor.disconnect()
    bench.driver.backend_ready(sandbox.metadata.id)
    bench.driver.event(sandbox.metadata.id, verdict_event())
    assert (await bench.get()).status.phase == pb.SANDBOX_PHASE_ERROR


async def test_a_verdict_can_be_read_later_and_after_a_restart(bench: GatewayBench) -> None:
    sandbox = await bench.create()
    watch = bench.watch(follow_events=True)
    bench.driver.event(sandbox.metadata.id, verdict_event())
    for number in range(400):
        bench.driver.event(
            sandbox.metadata.id,
            compute_driver_pb2.DriverPlatformEvent(
                source="docker", type="Normal", reason="PullingLayer", message=f"{number}"
            ),
        )
        await read(watch)
    watch.cancel()
    await bench.gateway.stop()
    await bench.start_gateway()
    (event,) = await tail(bench)
    assert dict(event.metadata) == VERDICT_METADATA


async def test_the_tail_keeps_the_verdict_behind_a_flood_of_progress(bench: GatewayBench) -> None:
    sandbox = await bench.create()
    watch = bench.watch(follow_events=True)
    await read(watch)
    bench.driver.event(sandbox.metadata.id, verdict_event())
    await read(watch)
    for number in range(300):
        event = compute_driver_pb2.DriverPlatformEvent(source="docker", type="Normal", reason=f"{number}")
        bench.driver.event(sandbox.metadata.id, event)
        await read(watch)
    watch.cancel()
    events = await tail(bench, 1000)
    assert dict(events[0].metadata) == VERDICT_METADATA
    assert [event.reason for event in events[1:]] == [str(number) for number in range(44, 300)]


async def test_a_watch_resumes_where_it_was(bench: GatewayBench) -> None:
    sandbox = await bench.create()
    watch = bench.watch(follow_events=True)
    await read(watch)
    cursors = []
    for number in range(4):
        bench.driver.event(sandbox.metadata.id, compute_driver_pb2.DriverPlatformEvent(reason=f"{number}"))
        event = await read(watch)
        cursors.append(event.cursor)
    watch.cancel()
    again = bench.watch(follow_events=True, resume_after_cursor=cursors[1])
    first = await read(again)
    assert first.WhichOneof("payload") == "sandbox"
    events = [await read(again), await read(again)]
    again.cancel()
    assert [event.event.reason for event in events] == ["2", "3"]
    # The cursor of the first message, too, leads to what followed it.
    third = bench.watch(follow_events=True, resume_after_cursor=first.cursor)
    await read(third)
    event = await read(third)
    assert event.event.reason == "2"
    third.cancel()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await bench.watch(follow_events=True, resume_after_cursor="elsewhere-1").read()
    assert caught.value.code() == grpc.StatusCode.OUT_OF_RANGE


async def test_events_of_unknown_sandboxes_and_impossible_times_are_dropped(bench: GatewayBench) -> None:
    sandbox = await bench.create()
    watch = bench.watch(follow_events=True)
    await read(watch)
    late = verdict_event()
    late.event_time.seconds = 2**62
    bench.driver.event(sandbox.metadata.id, late)
    bench.driver.event("unknown", verdict_event())
    bench.driver.gone("unknown")
    bench.driver.publish(compute_driver_pb2.WatchSandboxesEvent())
    odd = condition("False", "ContainerExited", "")
    odd.transition_time.seconds = 2**62
    bench.driver.snapshot(sandbox.metadata.id, odd)
    bench.driver.event(sandbox.metadata.id, verdict_event())
    event = await read(watch)
    watch.cancel()
    assert event.event.event_time.seconds < 2**62
    assert (await bench.get()).status.phase == pb.SANDBOX_PHASE_PROVISIONING


async def test_a_sandbox_removed_outside_is_erased_and_its_leftovers_are_reclaimed(bench: GatewayBench) -> None:
    sandbox, supervisor = await bench.ready()
    watch = bench.watch(follow_status=True)
    await read(watch)
    bench.driver.gone(sandbox.metadata.id)
    await rest(watch)
    assert await watch.code() == grpc.StatusCode.OK
    assert await supervisor.session_status() == grpc.StatusCode.OK
    await bench.gateway.settle()
    assert bench.driver.deleted == [sandbox.metadata.id]


async def test_a_snapshot_does_not_rename_a_sandbox(bench: GatewayBench) -> None:
    sandbox = await bench.create()
    seen = bench.driver.snapshot(sandbox.metadata.id, condition("True", "BackendReady"), publish=False)
    seen.name = "openshell-default--alpha"
    event = compute_driver_pb2.WatchSandboxesEvent(sandbox=compute_driver_pb2.WatchSandboxesSandboxEvent(sandbox=seen))
    bench.driver.publish(event)
    assert (await bench.until_reason("SupervisorNotConnected")).metadata.name == "alpha"


async def test_a_driver_that_comes_back_is_followed_again(bench: GatewayBench) -> None:
    sandbox, _ = await bench.ready()
    bench.driver.end_watches()
    await bench.driver.watch_open(2)
    await bench.driver.close()
    # What happened while nobody watched is in the replay of the new stream.
    failed = condition("False", "ControlSupervisorExited", MESSAGE)
    bench.driver.snapshot(sandbox.metadata.id, failed, publish=False)
    assert (await bench.get()).status.phase == pb.SANDBOX_PHASE_READY
    await bench.driver.serve(bench.config.compute_driver_socket)
    assert ready(await bench.until_reason("ControlSupervisorExited")).message == MESSAGE


SWEEP = {
    "driver_timings": DriverTimings(
        watch_reopen_seconds=0, reconcile_interval_seconds=0.05, orphan_grace_seconds=0, dial_window_seconds=5
    )
}


@pytest.mark.parametrize("bench", [SWEEP], indirect=True)
async def test_the_sweep_finds_what_the_watch_missed(bench: GatewayBench) -> None:
    sandbox = await bench.create()
    bench.driver.snapshot(sandbox.metadata.id, condition("False", "ContainerExited", "exited 3"), publish=False)
    assert ready(await bench.until_reason("ContainerExited")).message == "exited 3"


@pytest.mark.parametrize("bench", [SWEEP], indirect=True)
async def test_only_certain_absence_erases_a_sandbox(bench: GatewayBench) -> None:
    sandbox = await bench.create()
    bench.driver.failures["GetSandbox"] = (grpc.StatusCode.UNAVAILABLE, "engine away")
    bench.driver.sandboxes.clear()
    await bench.gateway.sweep_now()
    assert (await bench.get()).metadata.id == sandbox.metadata.id
    bench.driver.failures["ListSandboxes"] = (grpc.StatusCode.UNAVAILABLE, "engine away")
    with pytest.raises(DriverCallError):
        await bench.gateway.sweep_now()
    assert (await bench.get()).metadata.id == sandbox.metadata.id
    bench.driver.failures.clear()
    await bench.until_gone()


async def test_a_young_sandbox_is_not_an_orphan_but_a_deleted_one_is_settled(bench: GatewayBench) -> None:
    await bench.create("young")
    await bench.create("leaving")
    bench.driver.announces_deletion = False
    await bench.delete("leaving")
    bench.driver.sandboxes.clear()
    await bench.gateway.sweep_now()
    await bench.until_gone("leaving")
    assert (await bench.get("young")).metadata.name == "young"


@pytest.mark.parametrize(
    ("bench", "reported", "reason", "message"),
    [
        ({"deadlines": Deadlines(preparation_seconds=0.2)}, False, "ImagePreparationTimedOut",
         "Image preparation or initial supervisor startup exceeded its absolute deadline"),
        ({"deadlines": Deadlines(preparation_seconds=30)}, True, "ProvisioningTimedOut",
         f"Provisioning repair window expired after 300 seconds: {REJECTED_TEXT}"),
    ],
    indirect=["bench"],
)  # fmt: skip
async def test_an_attempt_that_takes_too_long_fails_and_is_stopped(
    bench: GatewayBench, reported: bool, reason: str, message: str
) -> None:
    bench.driver.failures["StopSandbox"] = (grpc.StatusCode.NOT_FOUND, "gone already")
    sandbox = await bench.create()
    supervisor = bench.supervisor(sandbox)
    if reported:
        await supervisor.report(pb.CONFIGURATION_ADMISSION_STATE_PENDING)
        await supervisor.report(pb.CONFIGURATION_ADMISSION_STATE_REJECTED)
        bench.clock.ahead = timedelta(seconds=301)
        # The report itself finds that the window has passed.
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await supervisor.report(pb.CONFIGURATION_ADMISSION_STATE_ACCEPTED)
        assert caught.value.code() in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.ABORTED)
        with pytest.raises(grpc.aio.AioRpcError):
            await supervisor.report(pb.CONFIGURATION_ADMISSION_STATE_REJECTED)
    seen = await bench.until(lambda found: found.status.phase == pb.SANDBOX_PHASE_ERROR)
    assert (ready(seen).reason, ready(seen).message) == (reason, message)
    seen = await bench.until(lambda found: found.status.provisioning.HasField("cleanup_completed_time"))
    assert bench.driver.stopped == [sandbox.metadata.id]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await supervisor.report(pb.CONFIGURATION_ADMISSION_STATE_PENDING)
    assert "explicitly start the sandbox after cleanup" in (caught.value.details() or "")


@pytest.mark.parametrize(
    "bench", [{"deadlines": Deadlines(preparation_seconds=0.1, cleanup_retry_seconds=0.05)}], indirect=True
)
async def test_a_reclamation_that_fails_is_repeated(bench: GatewayBench) -> None:
    bench.driver.failures["StopSandbox"] = (grpc.StatusCode.UNAVAILABLE, "engine away")
    await bench.create()
    seen = await bench.until(lambda found: bool(found.status.provisioning.cleanup_error))
    assert seen.status.provisioning.cleanup_error == "engine away"
    bench.driver.failures.clear()
    seen = await bench.until(lambda found: found.status.provisioning.HasField("cleanup_completed_time"))
    assert seen.status.provisioning.cleanup_error == ""


async def test_readiness_ends_the_timers(bench: GatewayBench) -> None:
    _, supervisor = await bench.ready()
    bench.clock.ahead = timedelta(minutes=50)  # more than any window, less than a token lives
    await supervisor.disconnect()
    assert (await bench.until_reason("DependenciesNotReady")).status.phase == pb.SANDBOX_PHASE_PROVISIONING
    await supervisor.connect()
    await bench.until_reason("DependenciesReady")


async def test_state_survives_a_restart_and_supervisors_come_back(bench: GatewayBench) -> None:
    sandbox, supervisor = await bench.ready()
    await bench.gateway.stop()
    await bench.start_gateway()
    seen = await bench.until_reason("DependenciesNotReady")
    assert seen.metadata.id == sandbox.metadata.id
    again = bench.supervisor(sandbox)
    again.instance_id = supervisor.instance_id
    await again.connect()
    await bench.until_reason("DependenciesReady")
    assert bench.driver.stopped == []


@pytest.mark.parametrize("bench", [{"stop_sandboxes_on_exit": True}], indirect=True)
async def test_sandboxes_are_stopped_at_exit_where_that_is_switched_on(bench: GatewayBench) -> None:
    sandbox, _ = await bench.ready()
    await bench.gateway.stop()
    assert bench.driver.stopped == [sandbox.metadata.id]
    await bench.start_gateway()
    # The intent is unchanged: it is not a user's stop.
    assert (await bench.get()).status.phase != pb.SANDBOX_PHASE_STOPPED


async def test_a_second_gateway_on_the_same_state_is_refused(bench: GatewayBench) -> None:
    with pytest.raises(ConfigurationError, match="another gateway"):
        await Gateway(bench.config).start()
    await bench.create()


async def test_a_driver_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    driver = ScriptedDriver()
    driver.capabilities.extension.protocol_version.major = 2
    config = GatewayConfig(listen_port=0, state_dir=tmp_path / "state", compute_driver_socket=tmp_path / "driver.sock")
    await driver.serve(config.compute_driver_socket)
    gateway = Gateway(config)
    await gateway.start()
    with pytest.raises(HandshakeError, match=r"extension protocol 2\.0"):
        await gateway.connect()
    await gateway.stop()
    await driver.close()


async def test_a_driver_that_never_answers_is_given_up(tmp_path: Path) -> None:
    timings = DriverTimings(dial_window_seconds=0.3)
    config = GatewayConfig(
        listen_port=0, state_dir=tmp_path / "s", compute_driver_socket=tmp_path / "nobody", driver_timings=timings
    )
    gateway = Gateway(config)
    await gateway.start()
    with pytest.raises(DriverCallError):
        await gateway.connect()
    await gateway.stop()


async def test_a_driver_that_starts_late_is_waited_for(tmp_path: Path) -> None:
    config = GatewayConfig(listen_port=0, state_dir=tmp_path / "state", compute_driver_socket=tmp_path / "driver.sock")
    gateway = Gateway(config)
    port = await gateway.start()
    connecting = asyncio.create_task(gateway.connect())
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    from openshell.wire.v1 import openshell_pb2_grpc

    stub: openshell_pb2_grpc.OpenShellAsyncStub = openshell_pb2_grpc.OpenShellStub(channel)
    assert (await stub.Health(pb.HealthRequest())).status == pb.SERVICE_STATUS_DEGRADED
    driver = ScriptedDriver()
    await driver.serve(config.compute_driver_socket)
    assert (await connecting).driver_name == "scripted"
    assert (await stub.Health(pb.HealthRequest())).status == pb.SERVICE_STATUS_HEALTHY
    await channel.close()
    await gateway.stop()
    await driver.close()
