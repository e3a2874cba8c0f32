"""The checklist for a driver, row by row (compute-driver contract 9), in the test's process and over the socket."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import grpc
import pytest
from scripted.compute_gateway import ComputeGateway, launch_authentication, peer, ready
from scripted.retained import read_text, refreshed, refusal, start, stop, stopped, wait_ready_again

from openshell.isolation.documents import BoundaryBootstrap, MainProcessSpec
from openshell.wire.compute.v1 import compute_driver_pb2 as pb

if TYPE_CHECKING:
    from scripted.deployment import Deployment, Served

pytestmark = pytest.mark.asyncio(loop_scope="module")

SERVICE = pb.DESCRIPTOR.services_by_name["ComputeDriver"]
ACKNOWLEDGEMENT = (
    'v1:{"allow_driver_config":false,"resource_admission":{"enabled":true,"required_labels":'
    '{"openshell.ai/sandbox-attachable":"true","openshell.ai/sandbox-attachable-workspace":"${workspace}"}}}'
)
EMPTY_ANSWERS = {
    "GetCapabilities": "FAILED_PRECONDITION",
    "AuthenticateSandbox": "UNIMPLEMENTED",
    "ValidateSandboxCreate": "INVALID_ARGUMENT",
    "GetSandbox": "INVALID_ARGUMENT",
    "ListSandboxes": "OK",
    "CreateSandbox": "INVALID_ARGUMENT",
    "StopSandbox": "INVALID_ARGUMENT",
    "StartSandbox": "INVALID_ARGUMENT",
    "DeleteSandbox": "INVALID_ARGUMENT",
    "WatchSandboxes": "OK",
    "EnsureWorkspace": "OK",
    "DeleteWorkspace": "OK",
}
"""What each RPC answers to an empty request."""


def create(served: Served, sandbox: pb.DriverSandbox) -> grpc.aio.UnaryUnaryCall[pb.CreateSandboxRequest, object]:
    """Ask for a sandbox."""
    call: grpc.aio.UnaryUnaryCall[pb.CreateSandboxRequest, object] = served.link.stub.CreateSandbox(
        pb.CreateSandboxRequest(sandbox=sandbox)
    )
    return call


async def test_checklist_1_the_socket_is_for_its_owner_alone(served: Served) -> None:
    path = served.bench.folder / "s" / "d.sock"
    assert path.is_socket()
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


async def test_checklist_1_capabilities_are_the_same_bytes_each_time(served: Served) -> None:
    asked = pb.GetCapabilitiesRequest(gateway=peer())
    first = await served.link.stub.GetCapabilities(asked)
    assert first.resource_admission_policy == ACKNOWLEDGEMENT
    assert first.extension.supported_capabilities[:1] == ["openshell.compute.contract"]
    assert first.gateway_manages_lifecycle
    assert not first.supports_sandbox_authentication
    assert not first.driver_reports_runtime_readiness
    for _ in range(20):
        again = await served.link.stub.GetCapabilities(asked)
        assert again.SerializeToString(deterministic=True) == first.SerializeToString(deterministic=True)


@pytest.mark.parametrize("method", [each.name for each in SERVICE.methods])
async def test_checklist_2_every_rpc_is_answered(served: Served, method: str) -> None:
    request = getattr(pb, f"{method}Request")()
    call = getattr(served.link.stub, method)(request)
    if SERVICE.methods_by_name[method].server_streaming:
        await call.initial_metadata()
        assert not call.done()
        call.cancel()
        return
    with contextlib.suppress(grpc.aio.AioRpcError):
        await call
    assert (await call.code()).name == EMPTY_ANSWERS[method]


async def test_checklist_2_an_older_gateway_is_told_that_no_listener_is_needed(served: Served) -> None:
    ask: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = served.link.channel.unary_unary(
        f"/{SERVICE.full_name}/GetGatewayListenerRequirements"
    )
    assert await ask(b"") == b""


async def test_checklist_3_validation_changes_nothing_and_needs_no_credentials(served: Served) -> None:
    wanted = served.bench.sandbox()
    wanted.spec.ClearField("launch_authentication")
    seen = len(served.link.events)
    await served.link.stub.ValidateSandboxCreate(pb.ValidateSandboxCreateRequest(sandbox=wanted))
    wanted.spec.template.resources.cpu_request = "1"
    code, _ = await refusal(served.link.stub.ValidateSandboxCreate(pb.ValidateSandboxCreateRequest(sandbox=wanted)))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert (served.bench.sandbox_left_over(wanted.id), len(served.link.events)) == ([], seen)
    assert wanted.id not in await served.listed()


async def test_checklist_3_a_create_is_reserved_told_and_answered_while_it_goes_on(served: Served) -> None:
    wanted = served.bench.sandbox("never")  # its supervisor never becomes healthy
    await create(served, wanted)
    assert ready(await served.observed(wanted.id)).reason == "Starting"
    assert ready((await served.listed())[wanted.id]).reason == "Starting"
    code, _ = await refusal(create(served, wanted))
    assert code is grpc.StatusCode.ALREADY_EXISTS
    await served.link.wait(lambda e: e.platform_event.sandbox_id == wanted.id)
    await served.link.wait_reason(wanted.id, "Starting")
    scheduled = served.link.platform_events(wanted.id)[0]
    assert (scheduled.reason, scheduled.type) == ("Scheduled", "Normal")
    assert scheduled.metadata["openshell.progress.complete_step"] == "requesting_sandbox"
    await served.delete(wanted.id)


async def test_checklist_3_a_refused_create_leaves_nothing(served: Served) -> None:
    wanted = served.bench.sandbox(agent_socket_path="/x")
    code, _ = await refusal(create(served, wanted))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    code, _ = await refusal(served.link.stub.GetSandbox(pb.GetSandboxRequest(sandbox_id=wanted.id)))
    assert code is grpc.StatusCode.NOT_FOUND
    assert served.bench.sandbox_left_over(wanted.id) == []
    assert wanted.id not in str(served.link.events)


async def test_checklist_3_a_gateway_that_goes_away_after_its_create_loses_nothing(served: Served) -> None:
    wanted = served.bench.sandbox()
    async with ComputeGateway(served.link.address) as other:
        await other.stub.CreateSandbox(pb.CreateSandboxRequest(sandbox=wanted))
    assert ready(await served.link.wait_ready(wanted.id)).reason == "BackendReady"
    await served.delete(wanted.id)


async def test_checklist_4_a_watch_replays_everything_first_and_then_goes_on(served: Served) -> None:
    there, new = served.bench.sandbox("there"), served.bench.sandbox("new")
    await served.bench.launch(served.link, there)
    async with ComputeGateway(served.link.address) as later:
        assert ready(await later.wait_ready(there.id)).reason == "BackendReady"
        assert later.events[0][1].sandbox.sandbox.id == there.id
        await create(served, new)
        assert ready(await later.wait_ready(new.id)).reason == "BackendReady"
        await served.delete(there.id)
        await later.wait_deleted(there.id)
        assert not later.call.done()
    await served.delete(new.id)


async def test_checklist_5_a_start_after_a_lost_driver_has_everything_of_the_create(deployment: Deployment) -> None:
    wanted = deployment.bench.sandbox("late-0.x", environment={"FROM_TEMPLATE": "1"})
    wanted.spec.log_level = "debug"
    wanted.spec.environment["FROM_SPEC"] = "2"
    wanted.spec.command.extend(["/bin/agent", "two words"])
    async with deployment.serving(kill=True) as served:
        await deployment.bench.launch(served.link, wanted)
        before = deployment.bench.container(wanted.id, "sandbox")
        await stop(served.link, wanted.id)
    async with deployment.serving() as served:
        assert await stopped(served.link, wanted.id)
        seen = len(served.link.events)
        await start(served.link, wanted.id, "g-2", launch_authentication(generation="g-2"))
        await wait_ready_again(served.link, wanted.id, seen)
        workload, supervisor = (deployment.bench.container(wanted.id, role) for role in ("sandbox", "supervisor"))
        assert (workload["Id"], workload["Image"]) == (before["Id"], before["Image"])
        bootstrap = BoundaryBootstrap.from_json(
            read_text(deployment.bench.client, workload["Id"], "/.openshell/channel/sandbox/bootstrap.json")
        )
        assert bootstrap.child_env == {"FROM_TEMPLATE": "1", "FROM_SPEC": "2"}
        assert bootstrap.generation == "g-2"
        assert (bootstrap.workload_identity.uid, bootstrap.workload_identity.gid) == (1200, 1300)
        environment = dict(entry.split("=", 1) for entry in supervisor["Config"]["Env"])
        spec = MainProcessSpec.from_json(environment["OPENSHELL_MAIN_PROCESS_SPEC"])
        assert spec.command == ("/bin/agent", "two words")
        assert environment["OPENSHELL_LOG_LEVEL"] == "debug"
        assert "--workdir" in supervisor["Config"]["Cmd"]
        await served.delete(wanted.id)


async def test_checklist_6_the_workload_starts_first_and_ready_waits_for_health(served: Served) -> None:
    wanted, unhealthy = served.bench.sandbox(), served.bench.sandbox("never")
    await create(served, unhealthy)
    assert ready(await served.bench.launch(served.link, wanted)).reason == "BackendReady"
    begun = [served.bench.container(wanted.id, role)["State"]["StartedAt"] for role in ("sandbox", "supervisor")]
    assert begun == sorted(begun)
    reasons = [event.reason for event in served.link.platform_events(wanted.id)]
    assert reasons == ["Scheduled", "ImagePresent", "Created", "Started"]
    assert ready(await served.observed(unhealthy.id)).reason == "Starting"
    await served.delete(wanted.id, unhealthy.id)


async def test_checklist_6_the_end_of_a_supervisor_is_told_and_ends_the_workload(served: Served) -> None:
    wanted = served.bench.sandbox("late-5.x")
    await served.bench.launch(served.link, wanted)
    served.bench.client.kill(served.bench.container(wanted.id, "supervisor")["Id"], "SIGUSR1")
    told = ready(await served.link.wait_reason(wanted.id, "ControlSupervisorExited"))
    assert "code 5" in told.message
    assert ready(await served.observed(wanted.id)) == told
    assert ready((await served.listed())[wanted.id]) == told
    assert served.link.platform_events(wanted.id)[-1].type == "Warning"
    workload = served.bench.container(wanted.id, "sandbox")["Id"]
    await asyncio.to_thread(served.bench.client.wait, workload, timeout=20)
    await served.delete(wanted.id)


async def test_checklist_7_stop_start_and_delete_may_be_repeated_and_are_done_when_they_return(served: Served) -> None:
    wanted = served.bench.sandbox()
    await served.bench.launch(served.link, wanted)
    workload = served.bench.container(wanted.id, "sandbox")["Id"]
    for _ in range(2):
        await stop(served.link, wanted.id)
        assert served.bench.container(wanted.id, "sandbox")["State"]["Status"] == "exited"
        assert await stopped(served.link, wanted.id)
    launch, seen = launch_authentication(generation="g-2"), len(served.link.events)
    await start(served.link, wanted.id, "g-2", launch)
    await wait_ready_again(served.link, wanted.id, seen)
    run = served.bench.container(wanted.id, "sandbox")
    assert run["Id"] == workload
    await start(served.link, wanted.id, "g-2", refreshed(launch))
    assert served.bench.container(wanted.id, "sandbox")["State"]["StartedAt"] == run["State"]["StartedAt"]
    other = launch_authentication(generation="g-3")
    code, _ = await refusal(start(served.link, wanted.id, "g-3", other))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    answers = [await served.link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id)) for _ in range(2)]
    assert [answer.deleted for answer in answers] == [True, False]
    assert served.bench.sandbox_left_over(wanted.id) == []
    await served.link.wait_deleted(wanted.id)


async def test_checklist_7_a_stop_ends_what_is_pending_first(served: Served) -> None:
    wanted = served.bench.sandbox("never")
    await create(served, wanted)
    await served.link.wait(
        lambda e: e.platform_event.sandbox_id == wanted.id and e.platform_event.event.reason == "Created"
    )
    await stop(served.link, wanted.id)
    assert await stopped(served.link, wanted.id)
    assert "Warning" not in {event.type for event in served.link.platform_events(wanted.id)}
    assert not served.bench.container(wanted.id, "sandbox")["State"]["Running"]
    await served.delete(wanted.id)


async def test_checklist_8_a_new_driver_adopts_what_runs_and_drops_what_is_stale(deployment: Deployment) -> None:
    bench = deployment.bench
    running, ended, failed = bench.sandbox("running"), bench.sandbox("ended"), bench.sandbox("exit-9.x")
    async with deployment.serving(kill=True) as served:
        for each in (running, ended, failed):
            await bench.launch(served.link, each)
        before = [bench.container(running.id, role) for role in ("sandbox", "supervisor")]
        bench.client.kill(bench.container(ended.id, "sandbox")["Id"], "SIGUSR1")
        told = ready(await served.link.wait_reason(ended.id, "ContainerExited"))
        run = bench.container(ended.id, "sandbox")["State"]
        remembered = ready(await served.observed(failed.id))
    stale = before[1]["Config"]["Labels"] | {"openshell.ai/isolation-role": "staging"}
    bench.client.create_container(bench.images.workload, "/bin/sh", labels=stale)
    async with deployment.serving() as served:
        after = [bench.container(running.id, role) for role in ("sandbox", "supervisor")]
        assert [each["Id"] for each in after] == [each["Id"] for each in before]
        assert [each["State"]["StartedAt"] for each in after] == [each["State"]["StartedAt"] for each in before]
        roles = {"label": [f"openshell.ai/sandbox-id={running.id}", "openshell.ai/isolation-role=staging"]}
        assert bench.client.containers(all=True, filters=roles) == []
        assert ready(await served.observed(running.id)).reason == "BackendReady"
        assert ready(await served.observed(failed.id)) == remembered
        assert ready(await served.observed(ended.id)) == told
        assert bench.container(ended.id, "sandbox")["State"] == run, "what has ended is not started again"
        await served.delete(running.id, ended.id, failed.id)


@pytest.mark.parametrize(
    ("name", "image", "user", "reason"),
    [
        ("exit-3.x", "", "", "ControlSupervisorStartFailed"),
        ("exit-78.x", "", "", "WorkspaceValidationFailed"),
        ("steady", "127.0.0.1:1/nobody/nothing:1", "", "ImagePullFailed"),
        ("steady", "", "nobody-here", "IdentityResolutionFailed"),
    ],
)
async def test_checklist_9_each_failure_of_a_launch_has_its_reason(
    served: Served, name: str, image: str, user: str, reason: str
) -> None:
    wanted = served.bench.sandbox(name, image)
    wanted.spec.workload_identity.user = user
    told = ready(await served.bench.launch(served.link, wanted))
    assert (told.status, told.reason) == ("False", reason)
    assert served.link.platform_events(wanted.id)[-1].reason == reason
    await served.delete(wanted.id)
