"""Policies that supervisors write back and report on, over the wire."""

from __future__ import annotations

from collections.abc import Awaitable
from datetime import UTC, timedelta
from typing import Any

import grpc
from scripted.gateway_bench import GatewayBench, refused
from scripted.supervisor import DEFAULT_POLICY

from openshell.wire.sandbox.v1 import sandbox_pb2
from openshell.wire.v1 import openshell_pb2 as pb

PENDING = pb.CONFIGURATION_ADMISSION_STATE_PENDING


async def test_policies_are_written_back_and_loaded(bench: GatewayBench) -> None:
    supervisor = bench.supervisor(await bench.create())
    before = await supervisor.configuration()
    assert (before.HasField("policy"), before.version, before.configuration_admitted, before.configuration_error) == (
        False, 0, False, ""
    )  # fmt: skip
    await supervisor.admit()
    after = await supervisor.configuration()
    assert (after.version, after.configuration_admitted, after.workspace) == (1, True, "default")
    assert after.config_revision > before.config_revision
    assert after.configuration_instance_id == supervisor.instance_id
    again = pb.UpdateConfigRequest(sandbox="alpha", policy=after.policy)
    assert (await supervisor.stub.UpdateConfig(again, metadata=supervisor.metadata)).version == 1
    assert await supervisor.configuration() == after
    loaded = pb.ReportPolicyStatusRequest(sandbox_id=supervisor.sandbox_id, version=1, status=pb.POLICY_STATUS_LOADED)
    await supervisor.stub.ReportPolicyStatus(loaded, metadata=supervisor.metadata)
    assert (await bench.get()).status.current_policy_version == 1
    environment = await supervisor.stub.GetSandboxProviderEnvironment(
        pb.GetSandboxProviderEnvironmentRequest(sandbox_id=supervisor.sandbox_id), metadata=supervisor.metadata
    )
    assert dict(environment.environment) == {}
    assert environment.provider_env_revision == after.provider_env_revision
    assert environment.policy_hash == after.policy_hash


async def test_a_written_back_policy_gives_its_attempt_more_time(bench: GatewayBench) -> None:
    sandbox = await bench.create()
    before = sandbox.status.provisioning
    assert before.configuration_change_id == f"initial:{before.attempt_id}"
    assert before.configuration_change_time == sandbox.metadata.created_time
    supervisor = bench.supervisor(sandbox)
    await supervisor.report(PENDING)
    bench.clock.ahead = timedelta(seconds=200)
    await supervisor.admit()
    after = (await bench.get()).status.provisioning
    assert after.configuration_change_id == "policy:1"
    moved = after.configuration_change_time.ToDatetime(tzinfo=UTC)
    assert moved >= before.configuration_change_time.ToDatetime(tzinfo=UTC) + timedelta(seconds=200)
    assert after.deadline.ToDatetime(tzinfo=UTC) == moved + timedelta(seconds=300)
    bench.clock.ahead = timedelta(seconds=450)
    bench.driver.backend_ready(sandbox.metadata.id)
    await supervisor.connect()
    await bench.until_reason("DependenciesReady")


async def test_a_repeated_write_back_is_replayed_to_its_supervisor_only(bench: GatewayBench) -> None:
    first, second = bench.supervisor(await bench.create("one")), bench.supervisor(await bench.create("two"))
    request = pb.UpdateConfigRequest(policy=DEFAULT_POLICY, request_id="11111111-1111-4111-8111-111111111111")
    await first.stub.UpdateConfig(request, metadata=first.metadata)
    again = first.stub.UpdateConfig(request, metadata=first.metadata)
    assert (await again).version == 1
    assert ("openshell-replayed", "true") in [*(await again.initial_metadata())]
    request.annotations["other"] = "payload"
    changed = first.stub.UpdateConfig(request, metadata=first.metadata)
    await refused(changed, grpc.StatusCode.INVALID_ARGUMENT, "another request")
    theirs = second.stub.UpdateConfig(request, metadata=second.metadata)
    assert (await theirs).version == 1
    assert ("openshell-replayed", "true") not in [*(await theirs.initial_metadata())]


async def test_a_write_back_with_a_malformed_request_id_stores_nothing(bench: GatewayBench) -> None:
    supervisor = bench.supervisor(await bench.create())
    request = pb.UpdateConfigRequest(policy=DEFAULT_POLICY, request_id="once")
    call = supervisor.stub.UpdateConfig(request, metadata=supervisor.metadata)
    await refused(call, grpc.StatusCode.INVALID_ARGUMENT, "request_id")
    assert not (await supervisor.configuration()).HasField("policy")


async def test_policy_reports_that_mean_nothing(bench: GatewayBench) -> None:
    supervisor = bench.supervisor(await bench.create())
    invalid = grpc.StatusCode.INVALID_ARGUMENT

    def report(sandbox_id: str, version: int, status: pb.PolicyStatus.ValueType) -> Awaitable[Any]:
        request = pb.ReportPolicyStatusRequest(sandbox_id=sandbox_id, version=version, status=status)
        return supervisor.stub.ReportPolicyStatus(request, metadata=supervisor.metadata)

    own = supervisor.sandbox_id
    await refused(report("", 1, pb.POLICY_STATUS_LOADED), invalid, "sandbox_id is required")
    await refused(report(own, 0, pb.POLICY_STATUS_LOADED), invalid, "version is required")
    await refused(report(own, 1, pb.POLICY_STATUS_PENDING), invalid, "status must be LOADED or FAILED")
    await refused(report(own, 7, pb.POLICY_STATUS_LOADED), grpc.StatusCode.NOT_FOUND, "policy revision not found")


async def test_a_supervisor_may_write_a_policy_and_nothing_else(bench: GatewayBench) -> None:
    supervisor = bench.supervisor(await bench.create())
    update, meta = supervisor.stub.UpdateConfig, supervisor.metadata
    denied, invalid = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.INVALID_ARGUMENT
    everywhere = pb.UpdateConfigRequest()
    setattr(everywhere, "global", True)
    await refused(update(pb.UpdateConfigRequest(sandbox="other"), metadata=meta), denied)
    await refused(update(pb.UpdateConfigRequest(setting_key="k"), metadata=meta), denied, "setting_key")
    await refused(update(everywhere, metadata=meta), denied, "global")
    await refused(update(pb.UpdateConfigRequest(), metadata=meta), invalid, "policy is required")
    root = sandbox_pb2.SandboxPolicy(process=sandbox_pb2.ProcessPolicy(run_as_user="0"))
    await refused(update(pb.UpdateConfigRequest(policy=root), metadata=meta), invalid, "privileges")
