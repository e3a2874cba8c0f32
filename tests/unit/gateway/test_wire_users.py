"""What users see over the wire, with a scripted driver behind a real socket."""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import Any

import grpc
import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from scripted.compute_driver import condition
from scripted.gateway_bench import WORKSPACE, GatewayBench, read, ready, refused, rest

from gateway_embedded.config import Deadlines
from gateway_embedded.rpc_table import rpc_table
from openshell.schema import own_schema_sha256
from openshell.wire.datamodel.v1.datamodel_pb2 import AllWorkspaces, WorkspaceSelector
from openshell.wire.sandbox.v1 import sandbox_pb2
from openshell.wire.v1 import openshell_pb2 as pb

HASH = ("openshell-schema-sha256", own_schema_sha256())


async def test_health_and_info(bench: GatewayBench) -> None:
    health = await bench.stub.Health(pb.HealthRequest())
    assert (health.status, health.version) == (pb.SERVICE_STATUS_HEALTHY, "0.1.5")
    info = await bench.stub.GetGatewayInfo(pb.GetGatewayInfoRequest())
    assert info.gateway_version.startswith("0.1.5+openshell-docker.")
    assert [(item.name, item.capabilities.driver_name) for item in info.compute_drivers] == [("docker", "scripted")]
    (extension,) = info.extensions
    assert (extension.kind, extension.implementation_name, extension.protocol_major) == (
        pb.EXTENSION_KIND_COMPUTE_DRIVER, "scripted/driver", 1
    )  # fmt: skip


async def test_every_response_names_the_schema(bench: GatewayBench) -> None:
    call = bench.stub.Health(pb.HealthRequest())
    assert HASH in [*(await call.initial_metadata())]
    assert HASH in [*(await call.trailing_metadata())]
    error = await refused(
        bench.stub.GetSandbox(pb.GetSandboxRequest(name="x", workspace_scope=WORKSPACE)), grpc.StatusCode.NOT_FOUND
    )
    assert HASH in [*error.trailing_metadata()]
    await bench.create()
    watch = bench.watch()
    assert HASH in [*(await watch.initial_metadata())]
    watch.cancel()


async def test_every_rpc_that_is_not_built_says_so(bench: GatewayBench) -> None:
    for entry in rpc_table().values():
        if entry.built:
            continue
        makers: dict[tuple[bool, bool], Any] = {
            (False, False): bench.channel.unary_unary,
            (False, True): bench.channel.unary_stream,
            (True, False): bench.channel.stream_unary,
            (True, True): bench.channel.stream_stream,
        }
        make = makers[entry.client_streaming, entry.server_streaming]
        call = make(entry.path)(iter(()) if entry.client_streaming else b"")
        assert await call.code() == grpc.StatusCode.UNIMPLEMENTED, entry.name
        assert entry.name in await call.details()
        assert HASH in [*(await call.trailing_metadata())]


async def test_a_new_sandbox_is_provisioning_and_the_driver_has_its_credentials(bench: GatewayBench) -> None:
    sandbox = await bench.create(
        labels={"team": "blue"}, annotations={"note": "x"}, spec=pb.SandboxSpec(command=["agent"], log_level="debug")
    )
    meta = sandbox.metadata
    assert (meta.name, meta.workspace, dict(meta.labels), dict(meta.annotations)) == (
        "alpha", "default", {"team": "blue"}, {"note": "x"}
    )  # fmt: skip
    assert str(uuid.UUID(meta.id)) == meta.id
    assert meta.resource_version >= 1
    assert meta.HasField("created_time")
    assert not meta.HasField("deletion_time")
    assert sandbox.status.phase == pb.SANDBOX_PHASE_PROVISIONING
    assert (ready(sandbox).status, ready(sandbox).reason) == ("False", "Starting")
    assert sandbox.spec.template.image == "demo:latest"
    assert list(sandbox.spec.command) == ["agent"]
    (validated,), (created,) = bench.driver.validated, bench.driver.created
    assert not validated.spec.launch_authentication
    assert not validated.spec.sandbox_token
    assert (created.id, created.name, created.workspace) == (meta.id, "alpha", "default")
    document = json.loads(created.spec.launch_authentication)
    assert created.spec.sandbox_token == document["supervisor"]["gateway_token"]
    # The capabilities were read at the start and before each of the two operations.
    assert len(bench.driver.hello) == 3
    assert all(hello.gateway.protocol_version.major == 1 for hello in bench.driver.hello)
    assert await bench.get() == sandbox or (await bench.get()).metadata.resource_version > meta.resource_version


async def test_a_name_is_made_when_none_is_given(bench: GatewayBench) -> None:
    first, second = await bench.create(""), await bench.create("")
    assert first.metadata.name
    assert first.metadata.name != second.metadata.name
    assert (await bench.get(first.metadata.name)).metadata.id == first.metadata.id


async def test_bad_requests_reach_neither_store_nor_driver(bench: GatewayBench) -> None:
    create, invalid = bench.stub.CreateSandbox, grpc.StatusCode.INVALID_ARGUMENT
    await refused(create(pb.CreateSandboxRequest(workspace_scope=WORKSPACE)), invalid, "spec is required")
    await refused(create(pb.CreateSandboxRequest(spec=pb.SandboxSpec())), invalid, "workspace_scope is required")
    await refused(
        create(pb.CreateSandboxRequest(spec=pb.SandboxSpec(), workspace_scope=WorkspaceSelector(workspace="x"))),
        grpc.StatusCode.NOT_FOUND,
        "workspace 'x'",
    )
    everywhere = WorkspaceSelector(all_workspaces=AllWorkspaces())
    await refused(
        create(pb.CreateSandboxRequest(spec=pb.SandboxSpec(), workspace_scope=everywhere)), invalid, "one workspace"
    )
    await refused(bench.create("Not A Name"), invalid, "not a sandbox name")
    await refused(bench.create(request_id="x"), invalid, "request_id")
    await refused(bench.create(spec=pb.SandboxSpec(providers=["p"])), grpc.StatusCode.UNIMPLEMENTED, "spec.providers")
    await refused(bench.stub.GetSandbox(pb.GetSandboxRequest(workspace_scope=WORKSPACE)), invalid, "name is required")
    await refused(bench.stub.GetSandbox(pb.GetSandboxRequest(name="a")), invalid, "workspace_scope")
    await refused(bench.stub.ListSandboxes(pb.ListSandboxesRequest()), invalid, "workspace_scope")
    await refused(bench.stub.DeleteSandbox(pb.DeleteSandboxRequest(name="a")), invalid, "workspace_scope")
    await refused(bench.watch("missing").read(), grpc.StatusCode.NOT_FOUND, "'missing'")
    await refused(bench.create(spec=pb.SandboxSpec(log_level="loud")), invalid, "log_level 'loud'")
    block = pb.SandboxTemplate()
    block.driver_config.update({"kubernetes": {"node": "a"}})
    await refused(bench.create(spec=pb.SandboxSpec(template=block)), invalid, "driver_config has a block for")
    unbuilt = grpc.StatusCode.UNIMPLEMENTED
    await refused(bench.watch("missing", since_time=Timestamp(seconds=1)).read(), unbuilt, "since_time")
    await refused(bench.watch("missing", log_sources=["supervisor"]).read(), unbuilt, "log_sources")
    await refused(bench.watch("missing", log_min_level="warn").read(), unbuilt, "log_min_level")
    assert bench.driver.validated == []
    listed = await bench.stub.ListSandboxes(pb.ListSandboxesRequest(workspace_scope=WORKSPACE))
    assert list(listed.sandboxes) == []


async def test_a_name_is_taken_once(bench: GatewayBench) -> None:
    await bench.create()
    error = await refused(bench.create(), grpc.StatusCode.ALREADY_EXISTS, "'alpha'")
    assert any(key == "grpc-status-details-bin" for key, _ in error.trailing_metadata())
    assert len(bench.driver.created) == 1


async def test_of_two_creates_at_the_same_time_one_wins(bench: GatewayBench) -> None:
    results = await asyncio.gather(bench.create(), bench.create(), return_exceptions=True)
    codes = [result.code() for result in results if isinstance(result, grpc.aio.AioRpcError)]
    assert codes == [grpc.StatusCode.ALREADY_EXISTS]
    assert len(bench.driver.created) == 1


@pytest.mark.parametrize(
    ("answer", "seen", "text"),
    [
        (grpc.StatusCode.ALREADY_EXISTS, grpc.StatusCode.ALREADY_EXISTS, "the driver's words"),
        (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.FAILED_PRECONDITION, "the driver's words"),
        (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, "create sandbox failed: the driver's words"),
        (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL, "create sandbox failed: the driver's words"),
    ],
)
async def test_a_failed_create_leaves_no_record(
    bench: GatewayBench, answer: grpc.StatusCode, seen: grpc.StatusCode, text: str
) -> None:
    bench.driver.failures["CreateSandbox"] = (answer, "the driver's words")
    await refused(bench.create(), seen, text)
    await refused(bench.get(), grpc.StatusCode.NOT_FOUND)
    assert bench.driver.deleted == []
    del bench.driver.failures["CreateSandbox"]
    await bench.create()


async def test_what_validation_answers_reaches_the_user_unchanged(bench: GatewayBench) -> None:
    bench.driver.failures["ValidateSandboxCreate"] = (grpc.StatusCode.INVALID_ARGUMENT, "memory is odd")
    error = await refused(bench.create(), grpc.StatusCode.INVALID_ARGUMENT)
    assert error.details() == "memory is odd"
    assert bench.driver.created == []
    await refused(bench.get(), grpc.StatusCode.NOT_FOUND)


async def test_a_driver_that_changes_its_policy_gets_no_more_sandboxes(bench: GatewayBench) -> None:
    policy = bench.driver.capabilities.resource_admission_policy
    bench.driver.capabilities.resource_admission_policy = policy.replace(",", ", ")
    await refused(bench.create(), grpc.StatusCode.FAILED_PRECONDITION, "restart the gateway")
    assert bench.driver.validated == []


async def test_a_client_that_goes_away_does_not_stop_its_create(bench: GatewayBench) -> None:
    gate = bench.driver.gates["CreateSandbox"] = asyncio.Event()
    call = bench.stub.CreateSandbox(
        pb.CreateSandboxRequest(name="alpha", workspace_scope=WORKSPACE, spec=pb.SandboxSpec())
    )
    await bench.driver.entered("CreateSandbox")
    call.cancel()
    assert await call.code() == grpc.StatusCode.CANCELLED
    gate.set()
    await bench.gateway.settle()
    assert (await bench.get()).status.phase == pb.SANDBOX_PHASE_PROVISIONING


async def test_listing_pages_and_filters(bench: GatewayBench) -> None:
    for index in range(5):
        await bench.create(f"s{index}", labels={"parity": str(index % 2)})
    request = pb.ListSandboxesRequest(workspace_scope=WORKSPACE, page_size=2)
    names: list[str] = []
    while True:
        page = await bench.stub.ListSandboxes(request)
        names += [sandbox.metadata.name for sandbox in page.sandboxes]
        if not page.next_page_token:
            break
        request.page_token = page.next_page_token
    assert names == [f"s{index}" for index in range(5)]
    odd = await bench.stub.ListSandboxes(
        pb.ListSandboxesRequest(
            workspace_scope=WorkspaceSelector(all_workspaces=AllWorkspaces()), label_selector="parity=1"
        )
    )
    assert [sandbox.metadata.name for sandbox in odd.sandboxes] == ["s1", "s3"]


async def test_a_delete_that_the_driver_announces(bench: GatewayBench) -> None:
    sandbox = await bench.create()
    answer = await bench.delete()
    assert answer.outcome in (pb.DELETION_OUTCOME_ACCEPTED, pb.DELETION_OUTCOME_COMPLETED)
    assert answer.sandbox_id == sandbox.metadata.id
    assert bench.driver.deleted == [sandbox.metadata.id]
    await bench.until_gone()
    await refused(bench.get(), grpc.StatusCode.NOT_FOUND)
    await refused(bench.delete(), grpc.StatusCode.NOT_FOUND)
    absent = await bench.delete(allow_missing=True)
    assert (absent.outcome, absent.sandbox_id) == (pb.DELETION_OUTCOME_ALREADY_ABSENT, "")


async def test_a_delete_is_pending_until_the_driver_says_deleted(bench: GatewayBench) -> None:
    sandbox = await bench.create()
    bench.driver.announces_deletion = False
    watch = bench.watch(follow_status=True)
    await read(watch)
    assert (await bench.delete()).outcome == pb.DELETION_OUTCOME_ACCEPTED
    seen = await bench.until(lambda found: found.status.phase == pb.SANDBOX_PHASE_DELETING)
    assert seen.metadata.HasField("deletion_time")
    # A late observation does not revive it.
    bench.driver.backend_ready(sandbox.metadata.id)
    bench.driver.gone(sandbox.metadata.id)
    phases = [event.sandbox.status.phase for event in await rest(watch)]
    assert await watch.code() == grpc.StatusCode.OK
    assert phases[-1] == pb.SANDBOX_PHASE_DELETING
    await refused(bench.get(), grpc.StatusCode.NOT_FOUND)
    # The deletion was asked for, so nothing more is reclaimed.
    assert bench.driver.deleted == [sandbox.metadata.id]


async def test_a_delete_of_what_the_driver_no_longer_has_is_complete(bench: GatewayBench) -> None:
    await bench.create()
    bench.driver.delete_answers = False
    assert (await bench.delete()).outcome == pb.DELETION_OUTCOME_COMPLETED
    await refused(bench.get(), grpc.StatusCode.NOT_FOUND)


async def test_a_failed_delete_leaves_the_sandbox_as_the_driver_sees_it(bench: GatewayBench) -> None:
    sandbox, _ = await bench.ready()
    bench.driver.failures["DeleteSandbox"] = (grpc.StatusCode.UNAVAILABLE, "engine away")
    await refused(bench.delete(), grpc.StatusCode.INTERNAL, "delete sandbox failed: engine away")
    seen = await bench.get()
    assert seen.status.phase == pb.SANDBOX_PHASE_READY
    assert not seen.metadata.HasField("deletion_time")
    bench.driver.failures["GetSandbox"] = (grpc.StatusCode.UNAVAILABLE, "engine away")
    await refused(bench.delete(), grpc.StatusCode.INTERNAL)
    assert (await bench.get()).status.phase == pb.SANDBOX_PHASE_READY
    bench.driver.snapshot(
        sandbox.metadata.id, condition("False", "OuterFenceViolation", "fence is gone"), publish=False
    )
    del bench.driver.failures["GetSandbox"]
    await refused(bench.delete(), grpc.StatusCode.INTERNAL)
    assert ready(await bench.get()).message == "fence is gone"
    bench.driver.sandboxes.clear()
    await refused(bench.delete(), grpc.StatusCode.INTERNAL)
    await refused(bench.get(), grpc.StatusCode.NOT_FOUND)


async def test_concurrent_deletes_are_one(bench: GatewayBench) -> None:
    await bench.create()
    gate = bench.driver.gates["DeleteSandbox"] = asyncio.Event()
    calls = [asyncio.create_task(bench.delete()) for _ in range(3)]
    await bench.driver.entered("DeleteSandbox")
    # The others reach the gateway over one connection, in order, before this call is answered.
    await bench.stub.Health(pb.HealthRequest())
    gate.set()
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert len(bench.driver.deleted) == 1
    assert all(not isinstance(answer, Exception) for answer in answers)


async def test_a_delete_during_a_create_leaves_nothing_at_the_driver(bench: GatewayBench) -> None:
    gate = bench.driver.gates["CreateSandbox"] = asyncio.Event()
    bench.driver.delete_answers = False
    creating = asyncio.create_task(bench.create())
    await bench.driver.entered("CreateSandbox")
    deleting = asyncio.create_task(bench.delete())
    await bench.driver.entered("DeleteSandbox")
    # The driver has not taken the create yet, so what it answers now is that there is no such sandbox.
    assert bench.driver.sandboxes == {}
    gate.set()
    await refused(creating, grpc.StatusCode.ABORTED, "'alpha' was deleted while it was being created")
    assert (await deleting).outcome == pb.DELETION_OUTCOME_COMPLETED
    assert bench.driver.sandboxes == {}
    await refused(bench.get(), grpc.StatusCode.NOT_FOUND)


@pytest.mark.parametrize("bench", [{"deadlines": Deadlines(cleanup_retry_seconds=0.01)}], indirect=True)
async def test_what_a_create_made_of_a_sandbox_that_is_gone_is_removed(bench: GatewayBench) -> None:
    gate = bench.driver.gates["CreateSandbox"] = asyncio.Event()
    creating = asyncio.create_task(bench.create())
    await bench.driver.entered("CreateSandbox")
    watch = bench.watch(follow_status=True)
    await read(watch)
    bench.driver.gone(bench.driver.created[0].id)
    await rest(watch)
    gate.set()
    bench.driver.failures["DeleteSandbox"] = (grpc.StatusCode.UNAVAILABLE, "engine away")
    await refused(creating, grpc.StatusCode.ABORTED, "deleted while")
    assert len(bench.driver.sandboxes) == 1
    bench.driver.failures.clear()
    await bench.gateway.settle()
    assert bench.driver.sandboxes == {}


async def test_a_watch_starts_with_the_sandbox_and_ends_at_ready_when_asked(bench: GatewayBench) -> None:
    sandbox = await bench.create()
    watch = bench.watch(follow_status=True, stop_on_terminal=True)
    first = await read(watch)
    assert first.sandbox.metadata.id == sandbox.metadata.id
    supervisor = bench.supervisor(sandbox)
    bench.driver.backend_ready(sandbox.metadata.id)
    await supervisor.run()
    events = await rest(watch)
    assert await watch.code() == grpc.StatusCode.OK
    phases = [event.sandbox.status.phase for event in events]
    assert phases[-1] == pb.SANDBOX_PHASE_READY
    assert pb.SANDBOX_PHASE_READY not in phases[:-1]
    versions = [event.sandbox.metadata.resource_version for event in (first, *events)]
    assert versions == sorted(set(versions))


async def test_a_watch_without_status_still_starts_with_the_sandbox(bench: GatewayBench) -> None:
    await bench.create()
    watch = bench.watch(follow_logs=True)
    assert (await read(watch)).WhichOneof("payload") == "sandbox"
    warning = await read(watch)
    assert warning.warning.message == "this gateway keeps no sandbox logs"
    watch.cancel()


async def test_configuration_for_users(bench: GatewayBench) -> None:
    policy = sandbox_pb2.SandboxPolicy(filesystem=sandbox_pb2.FilesystemPolicy(read_only=["/usr"]))
    await bench.create(spec=pb.SandboxSpec(policy=policy))
    request = sandbox_pb2.GetSandboxConfigRequest(name="alpha", workspace_scope=WORKSPACE)
    seen = await bench.stub.GetSandboxConfig(request)
    assert (seen.policy, seen.version, seen.configuration_admitted) == (policy, 1, True)
    assert len(seen.policy_hash) == 64
    await refused(
        bench.stub.UpdateConfig(pb.UpdateConfigRequest(sandbox="alpha", policy=policy, workspace_scope=WORKSPACE)),
        grpc.StatusCode.UNIMPLEMENTED,
        "by users",
    )


async def test_malformed_bytes_do_not_hurt(bench: GatewayBench) -> None:
    channel: Any = bench.channel
    call = channel.unary_unary("/openshell.v1.OpenShell/CreateSandbox")(b"\xff\xff\xff")
    assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "CreateSandboxRequest" in await call.details()
    watch = channel.unary_stream("/openshell.v1.OpenShell/WatchSandbox")(b"\xff\xff\xff")
    assert await watch.code() == grpc.StatusCode.INVALID_ARGUMENT
    session = channel.stream_stream("/openshell.v1.OpenShell/ConnectSupervisor")(iter((b"\xff\xff\xff",)))
    assert await session.code() == grpc.StatusCode.UNAUTHENTICATED
    await bench.create()


async def test_a_quiet_watch_outlives_the_pings_of_a_client_that_keeps_its_connection_alive(
    bench: GatewayBench,
) -> None:
    await bench.create()
    pings = (
        ("grpc.keepalive_time_ms", 1000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.use_local_subchannel_pool", 1),
    )
    async with grpc.aio.insecure_channel(bench.target, options=pings) as channel:
        request = pb.WatchSandboxRequest(sandbox="alpha", workspace_scope=WORKSPACE, follow_status=True)
        watch: grpc.aio.UnaryStreamCall[Any, Any] = channel.unary_stream(
            "/openshell.v1.OpenShell/WatchSandbox", request_serializer=pb.WatchSandboxRequest.SerializeToString
        )(request, timeout=4.5)  # grpc pings once a second at most, and the third ping too many ended a connection
        await rest(watch)
        assert await watch.code() is grpc.StatusCode.DEADLINE_EXCEEDED, await watch.details()


async def test_a_page_never_outgrows_what_a_client_can_read(bench: GatewayBench) -> None:
    large = pb.SandboxSpec(environment={"LARGE": "x" * 900_000})
    for name in ("alpha", "beta", "gamma"):
        await bench.create(name, spec=large)
    first = await bench.stub.ListSandboxes(pb.ListSandboxesRequest(workspace_scope=WORKSPACE))
    assert [found.metadata.name for found in first.sandboxes] == ["alpha", "beta"]
    rest_of_it = await bench.stub.ListSandboxes(
        pb.ListSandboxesRequest(workspace_scope=WORKSPACE, page_token=first.next_page_token)
    )
    assert ([found.metadata.name for found in rest_of_it.sandboxes], rest_of_it.next_page_token) == (["gamma"], "")
