"""What a supervisor's token is good for, over the wire."""

from __future__ import annotations

from datetime import UTC, timedelta
from typing import Any

import grpc
import pytest
from scripted.gateway_bench import WORKSPACE, GatewayBench, refused
from scripted.supervisor import ScriptedSupervisor, offer

from openshell.wire.datamodel.v1.datamodel_pb2 import WorkspaceSelector
from openshell.wire.sandbox.v1 import sandbox_pb2
from openshell.wire.v1 import openshell_pb2 as pb

PENDING = pb.CONFIGURATION_ADMISSION_STATE_PENDING


async def test_tokens_are_renewed(bench: GatewayBench) -> None:
    _, supervisor = await bench.ready()
    fresh = await supervisor.stub.RefreshSandboxToken(pb.RefreshSandboxTokenRequest(), metadata=supervisor.metadata)
    assert fresh.sandbox_token
    assert fresh.session_id
    assert fresh.credential_epoch == 1
    supervisor.metadata = (("authorization", f"Bearer {fresh.token}"),)
    await supervisor.configuration()


async def test_an_expired_token_is_called_expired(bench: GatewayBench) -> None:
    supervisor = bench.supervisor(await bench.create())
    await supervisor.configuration()
    bench.clock.ahead = timedelta(hours=1, seconds=31)
    expired = grpc.StatusCode.UNAUTHENTICATED
    await refused(supervisor.configuration(), expired, "token has expired")
    update = supervisor.stub.UpdateConfig(pb.UpdateConfigRequest(), metadata=supervisor.metadata)
    await refused(update, expired, "token has expired")
    renewal = supervisor.stub.RefreshSandboxToken(pb.RefreshSandboxTokenRequest(), metadata=supervisor.metadata)
    await refused(renewal, expired, "token has expired")


@pytest.mark.parametrize("bench", [{"nonexpiring_gateway_tokens": True}], indirect=True)
async def test_a_supervisor_whose_token_never_expires_outlives_the_gateways_absence(bench: GatewayBench) -> None:
    _, supervisor = await bench.ready()
    await bench.gateway.stop()
    bench.clock.ahead = timedelta(days=30)
    await bench.start_gateway()
    returned = ScriptedSupervisor(bench.target, bench.driver.created[0])
    returned.instance_id = supervisor.instance_id
    try:
        renewal = returned.stub.RefreshSandboxToken(pb.RefreshSandboxTokenRequest(), metadata=returned.metadata)
        assert not (fresh := await renewal).HasField("expiration_time")
        assert fresh.sandbox_expiration_time.ToDatetime(tzinfo=UTC) > bench.clock()
        await returned.connect()
        await bench.until_reason("DependenciesReady")
        await bench.delete()
        await bench.until_gone()
        await refused(returned.configuration(), grpc.StatusCode.NOT_FOUND)
    finally:
        await returned.close()


def sandbox_calls(supervisor: ScriptedSupervisor, sandbox_id: str) -> dict[str, Any]:
    admission = pb.SandboxConfigurationAdmission(instance_id=supervisor.instance_id, state=PENDING)
    return {
        "ReportSandboxConfiguration": pb.ReportSandboxConfigurationRequest(sandbox_id=sandbox_id, admission=admission),
        "ReportPolicyStatus": pb.ReportPolicyStatusRequest(
            sandbox_id=sandbox_id, version=1, status=pb.POLICY_STATUS_LOADED
        ),
        "GetSandboxProviderEnvironment": pb.GetSandboxProviderEnvironmentRequest(sandbox_id=sandbox_id),
        "ReportMainProcessExit": pb.ReportMainProcessExitRequest(sandbox_id=sandbox_id, instance_id="i"),
        "FinalizeMainProcessExit": pb.FinalizeMainProcessExitRequest(sandbox_id=sandbox_id, instance_id="i"),
    }


async def test_a_supervisor_speaks_for_its_own_sandbox_only(bench: GatewayBench) -> None:
    first, second = await bench.create("one"), await bench.create("two")
    supervisor = bench.supervisor(first)
    for name, request in sandbox_calls(supervisor, second.metadata.id).items():
        method = getattr(supervisor.stub, name)
        await refused(method(request, metadata=supervisor.metadata), grpc.StatusCode.PERMISSION_DENIED)
        await refused(method(request), grpc.StatusCode.UNAUTHENTICATED)
        bad = (("authorization", "Bearer nonsense"),)
        await refused(method(request, metadata=bad), grpc.StatusCode.UNAUTHENTICATED)
    other = sandbox_pb2.GetSandboxConfigRequest(name="two")
    await refused(
        supervisor.stub.GetSandboxConfig(other, metadata=supervisor.metadata), grpc.StatusCode.PERMISSION_DENIED
    )
    elsewhere = sandbox_pb2.GetSandboxConfigRequest(name="one", workspace_scope=WorkspaceSelector(workspace="else"))
    await refused(
        supervisor.stub.GetSandboxConfig(elsewhere, metadata=supervisor.metadata), grpc.StatusCode.PERMISSION_DENIED
    )
    listing = pb.ListSandboxesRequest(workspace_scope=WORKSPACE)
    await refused(
        supervisor.stub.ListSandboxes(listing, metadata=supervisor.metadata), grpc.StatusCode.PERMISSION_DENIED
    )
    hello = pb.SupervisorMessage(hello=pb.SupervisorHello(sandbox_id=supervisor.sandbox_id))
    await refused(offer(supervisor.stub.ConnectSupervisor(), hello), grpc.StatusCode.UNAUTHENTICATED)


async def test_a_token_outlives_its_sandbox_without_effect(bench: GatewayBench) -> None:
    sandbox = await bench.create()
    supervisor = bench.supervisor(sandbox)
    bench.driver.delete_answers = False
    await bench.delete()
    replacement = await bench.create()
    for name, request in sandbox_calls(supervisor, sandbox.metadata.id).items():
        method = getattr(supervisor.stub, name)
        await refused(method(request, metadata=supervisor.metadata), grpc.StatusCode.NOT_FOUND, "sandbox not found")
    assert (await bench.get()).metadata.id == replacement.metadata.id
