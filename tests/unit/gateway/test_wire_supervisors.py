"""What supervisors see over the wire, and what follows for the public status."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from scripted.compute_driver import condition
from scripted.gateway_bench import GatewayBench, condition_of, ready, refused, rest
from scripted.supervisor import offer

from openshell.wire.v1 import openshell_pb2 as pb

PENDING = pb.CONFIGURATION_ADMISSION_STATE_PENDING
ACCEPTED = pb.CONFIGURATION_ADMISSION_STATE_ACCEPTED
REJECTED = pb.CONFIGURATION_ADMISSION_STATE_REJECTED
GATEWAY_TEXT = "Effective configuration could not be activated; replace the policy or repair attached providers"
FAST = {"heartbeat_interval_seconds": 0.05}


async def test_ready_needs_backend_admission_and_session(bench: GatewayBench) -> None:
    sandbox = await bench.create()
    supervisor = bench.supervisor(sandbox)
    bench.driver.backend_ready(sandbox.metadata.id)
    seen = await bench.until_reason("SupervisorNotConnected")
    assert ready(seen).message == "Backend ready; waiting for supervisor session"
    await supervisor.report(PENDING)
    seen = await bench.until_reason("ConfigurationPending")
    assert ready(seen).message == "Waiting for effective configuration validation before workload activation"
    assert condition_of(seen, "ConfigurationReady").reason == "ConfigurationPending"
    await supervisor.admit()
    seen = await bench.until_reason("SupervisorNotConnected")
    assert condition_of(seen, "ConfigurationReady").status == "True"
    assert seen.status.configuration_activated
    assert seen.status.phase == pb.SANDBOX_PHASE_PROVISIONING
    accepted = await supervisor.connect()
    assert accepted.heartbeat_interval.ToTimedelta().total_seconds() == 10
    assert accepted.session_id
    seen = await bench.until_reason("DependenciesReady")
    assert (seen.status.phase, ready(seen).status, ready(seen).message) == (
        pb.SANDBOX_PHASE_READY, "True", "Supervisor session connected"
    )  # fmt: skip
    assert seen.status.main_process_instance_id == supervisor.instance_id
    assert seen.status.agent_pod == "container-of-alpha"
    assert seen.status.configuration_admission.state == ACCEPTED


async def test_a_session_before_any_report_is_not_ready(bench: GatewayBench) -> None:
    sandbox = await bench.create()
    supervisor = bench.supervisor(sandbox)
    bench.driver.backend_ready(sandbox.metadata.id)
    await supervisor.connect()
    seen = await bench.until_reason("ConfigurationPending")
    assert ready(seen).message == "Waiting for an authenticated supervisor configuration report"
    assert seen.status.phase == pb.SANDBOX_PHASE_PROVISIONING


async def test_a_lost_session_is_told_and_a_new_one_heals(bench: GatewayBench) -> None:
    sandbox, supervisor = await bench.ready()
    await supervisor.disconnect()
    seen = await bench.until_reason("DependenciesNotReady")
    assert (seen.status.phase, ready(seen).message) == (
        pb.SANDBOX_PHASE_PROVISIONING, "Supervisor session disconnected"
    )  # fmt: skip
    # Another look of the driver at the running container does not make that a first start.
    bench.driver.backend_ready(sandbox.metadata.id)
    await supervisor.connect()
    await bench.until_reason("DependenciesReady")


async def test_a_newer_session_takes_the_older_ones_place(bench: GatewayBench) -> None:
    sandbox, first = await bench.ready()
    second = bench.supervisor(sandbox)
    await second.run()
    assert await first.session_status() == grpc.StatusCode.ABORTED
    seen = await bench.until_reason("DependenciesReady")
    assert seen.status.main_process_instance_id == second.instance_id


async def test_ready_rests_on_the_session_of_the_admitted_instance(bench: GatewayBench) -> None:
    sandbox, first = await bench.ready()
    second = bench.supervisor(sandbox)
    await second.admit()
    assert (await bench.get()).status.configuration_admission.state == ACCEPTED
    seen = await bench.get()  # the first one's session is still open
    assert (seen.status.phase, ready(seen).reason) == (pb.SANDBOX_PHASE_PROVISIONING, "SupervisorNotConnected")
    stranger = bench.supervisor(sandbox)
    await stranger.connect()
    assert await first.session_status() == grpc.StatusCode.ABORTED
    seen = await bench.get()
    assert (seen.status.phase, ready(seen).reason) == (pb.SANDBOX_PHASE_PROVISIONING, "SupervisorNotConnected")
    await second.connect()
    assert await stranger.session_status() == grpc.StatusCode.ABORTED
    await bench.until_reason("DependenciesReady")


async def test_the_first_message_must_be_a_hello(bench: GatewayBench) -> None:
    supervisor = bench.supervisor(await bench.create())
    invalid = grpc.StatusCode.INVALID_ARGUMENT

    def session() -> grpc.aio.StreamStreamCall[Any, Any]:
        return supervisor.stub.ConnectSupervisor(metadata=supervisor.metadata)

    await refused(offer(session(), pb.SupervisorMessage(heartbeat=pb.SupervisorHeartbeat())), invalid)
    silent = session()
    await silent.done_writing()
    assert await silent.code() == invalid
    other = pb.SupervisorMessage(hello=pb.SupervisorHello(sandbox_id="other", instance_id="i"))
    await refused(offer(session(), other), grpc.StatusCode.PERMISSION_DENIED)
    for instance in ("", "i", "x" * 100_000):
        hello = pb.SupervisorHello(sandbox_id=supervisor.sandbox_id, instance_id=instance)
        await refused(offer(session(), pb.SupervisorMessage(hello=hello)), invalid, "instance_id must be a UUID")
    assert (await bench.get()).status.main_process_instance_id == ""


@pytest.mark.parametrize("bench", [FAST], indirect=True)
async def test_a_silent_supervisor_loses_its_session(bench: GatewayBench) -> None:
    _, supervisor = await bench.ready()
    assert (await supervisor.hear()).WhichOneof("payload") == "heartbeat"
    assert await supervisor.session_status() == grpc.StatusCode.UNAVAILABLE
    await bench.until_reason("DependenciesNotReady")


@pytest.mark.parametrize("bench", [FAST], indirect=True)
async def test_heartbeats_keep_a_session(bench: GatewayBench) -> None:
    _, supervisor = await bench.ready()
    for _ in range(8):
        await supervisor.beat()
        assert (await supervisor.hear()).WhichOneof("payload") == "heartbeat"
    assert (await bench.get()).status.phase == pb.SANDBOX_PHASE_READY


async def test_the_gateways_stop_and_a_delete_end_a_session_differently(bench: GatewayBench) -> None:
    _, first = await bench.ready("one")
    _, second = await bench.ready("two")
    await bench.delete("one")
    assert await first.session_status() == grpc.StatusCode.OK
    watch = bench.watch("two", follow_status=True)
    await watch.read()
    await bench.gateway.stop()
    assert await second.session_status() == grpc.StatusCode.UNAVAILABLE
    await rest(watch)
    assert await watch.code() == grpc.StatusCode.UNAVAILABLE


async def test_an_unflagged_rejection_can_be_repaired(bench: GatewayBench) -> None:
    sandbox = await bench.create()
    supervisor = bench.supervisor(sandbox)
    bench.driver.backend_ready(sandbox.metadata.id)
    await supervisor.report(PENDING)
    await supervisor.report(REJECTED)
    seen = await bench.until_reason("ConfigurationInvalid")
    assert (seen.status.phase, ready(seen).message) == (pb.SANDBOX_PHASE_PROVISIONING, GATEWAY_TEXT)
    assert seen.status.configuration_admission.error == GATEWAY_TEXT
    await supervisor.admit()
    await supervisor.connect()
    await bench.until_reason("DependenciesReady")


async def test_a_refused_attachment_is_an_invalid_configuration_whatever_the_driver_says_after(
    bench: GatewayBench,
) -> None:
    sandbox = await bench.create()
    supervisor = bench.supervisor(sandbox)
    bench.driver.backend_ready(sandbox.metadata.id)
    await supervisor.admit()
    await supervisor.report(REJECTED, refused=True)
    seen = await bench.until(lambda found: found.status.phase == pb.SANDBOX_PHASE_ERROR)
    bench.driver.snapshot(sandbox.metadata.id, condition("False", "ControlSupervisorExited", "exited with code 1"))
    bench.driver.event(sandbox.metadata.id, _warning())
    watch = bench.watch(event_tail=1, follow_events=True)
    async for event in watch:
        if event.WhichOneof("payload") == "event":
            break
    watch.cancel()
    after = await bench.get()
    assert after == seen
    assert (ready(after).reason, ready(after).message) == ("ConfigurationInvalid", GATEWAY_TEXT)
    assert condition_of(after, "ConfigurationReady").reason == "ConfigurationInvalid"


async def test_a_refusal_that_comes_after_the_exit_still_explains_it(bench: GatewayBench) -> None:
    sandbox = await bench.create()
    supervisor = bench.supervisor(sandbox)
    await supervisor.admit()
    bench.driver.snapshot(sandbox.metadata.id, condition("False", "ControlSupervisorStartFailed", "exited"))
    await bench.until_reason("ControlSupervisorStartFailed")
    await supervisor.report(REJECTED, refused=True)
    assert ready(await bench.get()).reason == "ConfigurationInvalid"


async def test_an_instance_that_is_not_registered_counts_for_nothing(bench: GatewayBench) -> None:
    supervisor = bench.supervisor(await bench.create())
    await supervisor.admit()
    other = "22222222-2222-4222-8222-222222222222"
    precondition = grpc.StatusCode.FAILED_PRECONDITION
    await refused(supervisor.report(PENDING, instance_id=other), precondition, "registration fence")
    await refused(supervisor.report(ACCEPTED, instance_id=other), precondition, "instance has changed")
    await supervisor.report(PENDING, instance_id=other, expected=supervisor.instance_id)
    await refused(supervisor.report(ACCEPTED), precondition, "instance has changed")
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    await refused(supervisor.report(ACCEPTED, refused=True), invalid, "refused_before_start")
    await refused(supervisor.report(PENDING, instance_id="x"), invalid, "instance_id must be a UUID")


async def test_a_moved_configuration_is_fetched_again(bench: GatewayBench) -> None:
    supervisor = bench.supervisor(await bench.create())
    await supervisor.report(PENDING)
    # Nothing is admitted yet: there is no policy.
    await refused(supervisor.report(ACCEPTED), grpc.StatusCode.ABORTED, "fetch and validate again")


@pytest.mark.parametrize(
    ("code", "phase", "reason"),
    [
        (0, pb.SANDBOX_PHASE_COMPLETED, "MainProcessCompleted"),
        (3, pb.SANDBOX_PHASE_ERROR, "MainProcessFailed"),
    ],
)
async def test_the_main_process_ends(
    bench: GatewayBench, code: int, phase: pb.SandboxPhase.ValueType, reason: str
) -> None:
    sandbox, supervisor = await bench.ready()
    report = pb.ReportMainProcessExitRequest(
        sandbox_id=sandbox.metadata.id, instance_id=supervisor.instance_id, exit_code=code
    )
    finalize = pb.FinalizeMainProcessExitRequest(sandbox_id=sandbox.metadata.id, instance_id=supervisor.instance_id)
    stub, meta = supervisor.stub, supervisor.metadata
    await refused(stub.FinalizeMainProcessExit(finalize, metadata=meta), grpc.StatusCode.FAILED_PRECONDITION)
    for _ in range(2):
        await stub.ReportMainProcessExit(report, metadata=meta)
    for _ in range(2):
        await stub.FinalizeMainProcessExit(finalize, metadata=meta)
    bench.driver.snapshot(sandbox.metadata.id, condition("False", "ControlSupervisorExited", "exited with code 0"))
    await supervisor.disconnect()
    seen = await bench.get()
    assert (seen.status.phase, ready(seen).reason) == (phase, reason)
    assert seen.status.HasField("exit_code")
    assert seen.status.exit_code == code
    report.exit_code += 1
    await refused(stub.ReportMainProcessExit(report, metadata=meta), grpc.StatusCode.FAILED_PRECONDITION)
    report.instance_id = "another"
    await refused(stub.ReportMainProcessExit(report, metadata=meta), grpc.StatusCode.FAILED_PRECONDITION)


def _warning() -> Any:
    from openshell.wire.compute.v1 import compute_driver_pb2

    return compute_driver_pb2.DriverPlatformEvent(
        source="docker", type="Warning", reason="ControlSupervisorExited", message="exited with code 1"
    )
