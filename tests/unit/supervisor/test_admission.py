"""Admission: what one look at the configuration calls for, and the startup loop against a gateway on the wire."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
import pytest
from unit.supervisor.fake_gateway import INSTANCE_ID, TOKEN, a_configuration, a_policy

from openshell.isolation.operations import LandlockRequirement, NetworkMode
from openshell.status import StatusCode
from openshell.wire.sandbox.v1 import sandbox_pb2
from openshell.wire.v1 import openshell_pb2
from supervisor_reference.admission import (
    INVALID_IMAGE_POLICY,
    NO_POLICY,
    NOT_ADMITTED,
    NOT_LOADABLE,
    UNSTABLE,
    Accept,
    Admission,
    Admitted,
    ImageDiscovery,
    Judgement,
    PassOutcome,
    Reject,
    WritePolicy,
    judge,
    pause_before_next,
    unproductive_after,
)
from supervisor_reference.errors import GatewayError, StageError
from supervisor_reference.gateway import ConfigurationSnapshot, Generation
from supervisor_reference.policy import parse_image_policy, restrictive_default
from supervisor_reference.timing import Timing

if TYPE_CHECKING:
    from unit.supervisor.fake_gateway import FakeGateway

    from supervisor_reference.grpc_gateway import GrpcGateway

PENDING = openshell_pb2.CONFIGURATION_ADMISSION_STATE_PENDING
ACCEPTED = openshell_pb2.CONFIGURATION_ADMISSION_STATE_ACCEPTED
REJECTED = openshell_pb2.CONFIGURATION_ADMISSION_STATE_REJECTED
FENCE = "11111111-1111-4111-8111-111111111111"
NOTHING = ImageDiscovery()
IMAGE_POLICY = ImageDiscovery(policy=sandbox_pb2.SandboxPolicy(version=9))


def snapshot(
    *,
    policy: sandbox_pb2.SandboxPolicy | None = None,
    admitted: bool = True,
    error: str = "",
    from_global_policy: bool = False,
) -> ConfigurationSnapshot:
    return ConfigurationSnapshot(
        generation=Generation(policy_version=0, policy_hash="", config_revision=1, provider_env_revision=1),
        policy=policy,
        from_global_policy=from_global_policy,
        admitted=admitted,
        instance_id=FENCE,
        error=error,
        workspace="default",
    )


@pytest.mark.parametrize(
    ("seen", "image", "written", "expected"),
    [
        (snapshot(policy=a_policy()), NOTHING, False, Accept(policy=a_policy())),
        (snapshot(policy=a_policy()), ImageDiscovery(invalid=True), False, Accept(policy=a_policy())),
        (snapshot(policy=a_policy(), admitted=False), NOTHING, False, Reject(error=NOT_ADMITTED)),
        (snapshot(policy=a_policy(), admitted=False, error="bad"), NOTHING, False, Reject(error="bad")),
        (snapshot(error="broken"), IMAGE_POLICY, False, Reject(error="broken")),
        (snapshot(), ImageDiscovery(invalid=True), False, Reject(error=INVALID_IMAGE_POLICY)),
        (snapshot(), IMAGE_POLICY, False, WritePolicy(policy=sandbox_pb2.SandboxPolicy(version=9))),
        (snapshot(admitted=False), NOTHING, False, WritePolicy(policy=restrictive_default())),
        (snapshot(), IMAGE_POLICY, True, Reject(error=NO_POLICY)),
        (snapshot(from_global_policy=True), IMAGE_POLICY, False, Reject(error=NO_POLICY)),
    ],
)
def test_judges_a_configuration(
    seen: ConfigurationSnapshot, image: ImageDiscovery, written: bool, expected: Judgement
) -> None:
    assert judge(seen, image, written=written) == expected


@pytest.mark.parametrize(
    ("outcome", "before", "after", "pause"),
    [
        (PassOutcome.REJECTION_RECORDED, 4, 0, 2.0),
        (PassOutcome.REJECTION_OUTDATED, 1, 2, 0.0),
        (PassOutcome.CONFLICT, 0, 1, 2.0),
        (PassOutcome.CONFLICT, 1, 2, 4.0),
    ],
)
def test_a_pass_costs_patience_and_time(outcome: PassOutcome, before: int, after: int, pause: float) -> None:
    count = unproductive_after(outcome, before)
    assert count == after
    assert pause_before_next(outcome, count, Timing()) == pause


async def admit(gateway: GrpcGateway, timing: Timing, image: ImageDiscovery = NOTHING) -> Admitted:
    admission = Admission(gateway, timing)
    return await admission.admit(await admission.register(), image)


async def test_reports_pending_then_the_exact_generation_as_accepted(
    fake: FakeGateway, gateway: GrpcGateway, timing: Timing
) -> None:
    admitted = await admit(gateway, timing)
    pending, accepted = fake.reports()
    assert (pending.admission.state, accepted.admission.state) == (PENDING, ACCEPTED)
    assert {pending.expected_instance_id, accepted.expected_instance_id} == {FENCE}
    assert accepted.admission == openshell_pb2.SandboxConfigurationAdmission(
        instance_id=INSTANCE_ID,
        state=ACCEPTED,
        policy_version=3,
        policy_hash="abc",
        config_revision=7,
        provider_env_revision=1,
    )
    assert admitted.policy.read_only == ("/usr",)
    assert admitted.policy.landlock is LandlockRequirement.HARD_REQUIREMENT
    assert admitted.policy.network is NetworkMode.BLOCK
    assert admitted.written_version is None
    assert {header for _, header in fake.authorizations} == {f"Bearer {TOKEN}"}


async def test_a_conflict_is_answered_with_a_fresh_look(
    fake: FakeGateway, gateway: GrpcGateway, timing: Timing
) -> None:
    moved = a_configuration()
    moved.config_revision = 8
    moved.configuration_instance_id = "33333333-3333-4333-8333-333333333333"
    fake.configurations = [a_configuration(), moved]
    admission = Admission(gateway, timing)
    first = await admission.register()
    fake.failures["ReportSandboxConfiguration"] = [(grpc.StatusCode.ABORTED, "moved")]
    admitted = await admission.admit(first, NOTHING)
    assert admitted.generation.config_revision == 8
    assert [report.admission.config_revision for report in fake.reports()] == [7, 7, 8]
    assert {report.expected_instance_id for report in fake.reports()} == {FENCE}, "never refreshed"


async def test_gives_up_after_five_passes_without_progress(
    fake: FakeGateway, gateway: GrpcGateway, timing: Timing
) -> None:
    admission = Admission(gateway, timing)
    first = await admission.register()
    fake.failures["ReportSandboxConfiguration"] = [(grpc.StatusCode.ABORTED, "moved")] * 9
    with pytest.raises(StageError) as caught:
        await admission.admit(first, NOTHING)
    assert caught.value.public == UNSTABLE
    assert len(fake.reports()) == 1 + 5


async def test_a_moving_provider_revision_is_not_accepted(
    fake: FakeGateway, gateway: GrpcGateway, timing: Timing
) -> None:
    fake.environment.provider_env_revision = 2
    with pytest.raises(StageError, match="did not stabilize"):
        await admit(gateway, timing)
    assert [report.admission.state for report in fake.reports()] == [PENDING]


async def test_a_rejected_configuration_is_looked_at_until_it_is_repaired(
    fake: FakeGateway, gateway: GrpcGateway, timing: Timing
) -> None:
    broken = a_configuration()
    broken.configuration_admitted = False
    # More often than the passes that a start may waste: each recorded rejection counts as progress.
    fake.configurations = [broken] * 8 + [a_configuration()]
    await admit(gateway, timing)
    *rejections, accepted = fake.reports()[1:]
    assert {(report.admission.state, report.admission.error) for report in rejections} == {(REJECTED, NOT_ADMITTED)}
    assert len(rejections) == 8
    assert not any(report.refused_before_start for report in rejections)
    assert accepted.admission.state == ACCEPTED


async def test_stores_the_images_policy_and_knows_that_it_wrote_it(
    fake: FakeGateway, gateway: GrpcGateway, timing: Timing
) -> None:
    missing = a_configuration()
    missing.ClearField("policy")
    missing.version = 0
    fake.configurations = [missing]
    image = parse_image_policy('{"version": 1, "filesystem": {"read_only": ["/opt"]}}')
    admitted = await admit(gateway, timing, ImageDiscovery(policy=image))
    (written,) = fake.of("UpdateConfig")
    assert isinstance(written, openshell_pb2.UpdateConfigRequest)
    assert written.sandbox == "first"
    assert written.workspace_scope.workspace == "default"
    assert list(written.policy.filesystem.read_only) == ["/opt"]
    assert admitted.written_version == 4
    assert admitted.policy.read_only == ("/opt",)


async def test_a_refused_policy_is_reported_with_the_gateways_words(
    fake: FakeGateway, gateway: GrpcGateway, timing: Timing
) -> None:
    missing = a_configuration()
    missing.ClearField("policy")
    fake.configurations = [missing, a_configuration()]
    fake.failures["UpdateConfig"] = [(grpc.StatusCode.INVALID_ARGUMENT, "no\nsuch \x1b[31mthing" + "x" * 2000)]
    await admit(gateway, timing)
    rejection = fake.reports()[1].admission
    assert rejection.error.startswith("Gateway rejected the image policy: no such [31mthingxxx")
    assert len(rejection.error.encode()) <= 512 + len("Gateway rejected the image policy: ")


async def test_a_policy_that_no_boundary_can_enforce_fails_its_revision(
    fake: FakeGateway, gateway: GrpcGateway, timing: Timing
) -> None:
    odd = a_configuration()
    odd.policy.landlock.compatibility = "sometimes"
    fake.configurations = [odd, a_configuration()]
    await admit(gateway, timing)
    (status,) = fake.of("ReportPolicyStatus")
    assert isinstance(status, openshell_pb2.ReportPolicyStatusRequest)
    assert (status.version, status.status) == (3, openshell_pb2.POLICY_STATUS_FAILED)
    assert "sometimes" in status.load_error
    assert fake.reports()[1].admission.error == NOT_LOADABLE


async def test_a_fenced_registration_is_final(fake: FakeGateway, gateway: GrpcGateway, timing: Timing) -> None:
    fake.failures["ReportSandboxConfiguration"] = [
        (grpc.StatusCode.FAILED_PRECONDITION, "supervisor registration fence has changed")
    ]
    with pytest.raises(GatewayError) as caught:
        await admit(gateway, timing)
    assert caught.value.status is StatusCode.FAILED_PRECONDITION
    assert "supervisor registration fence has changed" in caught.value.reason
    assert len(fake.reports()) == 1


async def test_a_gateway_that_comes_back_is_asked_again(
    fake: FakeGateway, gateway: GrpcGateway, timing: Timing
) -> None:
    fake.failures["GetSandboxConfig"] = [(grpc.StatusCode.UNAVAILABLE, "restarting")] * 2
    await admit(gateway, timing)
    assert len(fake.of("GetSandboxConfig")) == 3
