"""A launch from end to end: the order of its steps, and what each failure leaves behind."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from typing import TYPE_CHECKING

import grpc
import pytest
from unit.supervisor.fake_gateway import INSTANCE_ID, a_configuration, settled
from unit.supervisor.scripted_boundary import PROCESS_ID, ScriptedBoundary

from openshell.isolation import errors as isolation_errors
from openshell.isolation.negotiation import negotiate, our_metadata
from openshell.isolation.operations import (
    ExitStatus,
    ImagePolicy,
    ProcessKind,
    ProcessSnapshot,
    RetainedOutput,
    SessionSnapshot,
)
from openshell.verdicts import Category, LastWords, Stage
from openshell.wire.extension.v1.extension_pb2 import PeerMetadata, ProtocolVersion
from openshell.wire.v1 import openshell_pb2
from supervisor_reference.exit_codes import ExitCode
from supervisor_reference.process import until_end_or_signal
from supervisor_reference.renewal import TokenRenewal
from supervisor_reference.run import Supervisor

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from unit.supervisor.fake_gateway import FakeGateway
    from unit.supervisor.launch_material import LaunchMaterial

    from supervisor_reference.grpc_gateway import GrpcGateway
    from supervisor_reference.timing import Timing

    Outcome = tuple[ExitCode, LastWords | None]
    Start = Callable[..., Coroutine[object, object, Outcome]]

WORDS = "the kernel says no to /secret/place"


@pytest.fixture
async def boundary() -> ScriptedBoundary:
    return ScriptedBoundary()


@pytest.fixture
def supervise(
    gateway: GrpcGateway, launch: LaunchMaterial, fake: FakeGateway, timing: Timing, boundary: ScriptedBoundary
) -> Start:
    """Runs a supervisor to its end, as the process does."""

    async def start(*, command: tuple[str, ...] = ("/bin/agent", "--go")) -> Outcome:
        supervisor = Supervisor(
            launch.inputs(fake.url, command=command),
            gateway=gateway,
            open_boundary=boundary.open,
            instance_id=INSTANCE_ID,
            timing=timing,
        )
        return await until_end_or_signal(supervisor, timing)

    return start


async def test_nothing_runs_before_everything_is_agreed(
    fake: FakeGateway, boundary: ScriptedBoundary, supervise: Start
) -> None:
    fake.environment.environment["API_KEY"] = "placeholder"
    outcome = asyncio.create_task(supervise())
    await fake.sessions.get()
    boundary.ended.set_result(ExitStatus.exited(0))
    assert await outcome == (ExitCode.ORDERLY, None)
    assert boundary.calls == [
        "open",
        "discover_policy",
        "attach",
        "confirm",
        "start_agent",
        "wait",
        "terminate_boundary",
        "close",
    ]
    accepted = [name for name, _ in fake.calls].index("ReportSandboxConfiguration", 2)
    assert [name for name, _ in fake.calls].index("ConnectSupervisor") > accepted
    assert boundary.policy is not None
    assert boundary.policy.read_write == ("/tmp",)
    assert boundary.spec is not None
    assert (boundary.spec.program, boundary.spec.args, boundary.spec.workdir) == ("/bin/agent", ("--go",), "/sandbox")
    assert boundary.environment == {"API_KEY": "placeholder"}


async def test_the_policy_in_force_is_reported_as_loaded(
    fake: FakeGateway, boundary: ScriptedBoundary, supervise: Start
) -> None:
    outcome = asyncio.create_task(supervise())
    status = await fake.called("ReportPolicyStatus")
    assert isinstance(status, openshell_pb2.ReportPolicyStatusRequest)
    assert (status.version, status.status) == (3, openshell_pb2.POLICY_STATUS_LOADED)
    boundary.ended.set_result(ExitStatus.exited(0))
    await outcome


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (ExitStatus.exited(0), 0),
        (ExitStatus.exited(3), 3),
        (ExitStatus.signaled(9), 137),
        (ExitStatus.signaled(15), 143),
    ],
)
async def test_the_main_processs_exit_is_reported_and_ends_the_sandbox_in_order(
    fake: FakeGateway, boundary: ScriptedBoundary, supervise: Start, status: ExitStatus, code: int
) -> None:
    outcome = asyncio.create_task(supervise())
    await fake.sessions.get()
    boundary.ended.set_result(status)
    assert await outcome == (ExitCode.ORDERLY, None)
    (report,) = fake.of("ReportMainProcessExit")
    (final,) = fake.of("FinalizeMainProcessExit")
    assert isinstance(report, openshell_pb2.ReportMainProcessExitRequest)
    assert isinstance(final, openshell_pb2.FinalizeMainProcessExitRequest)
    assert (report.exit_code, report.instance_id, final.instance_id) == (code, INSTANCE_ID, INSTANCE_ID)


async def test_an_exit_that_cannot_be_told_is_no_orderly_end(
    fake: FakeGateway, boundary: ScriptedBoundary, supervise: Start
) -> None:
    fake.failures["ReportMainProcessExit"] = [(grpc.StatusCode.PERMISSION_DENIED, "stale token")]
    boundary.ended.set_result(ExitStatus.signaled(11))
    code, words = await supervise()
    assert code is ExitCode.INFRASTRUCTURE
    assert words is not None
    assert "was ended by SIGSEGV (exit code 139)" in words.public
    assert "stale token" in words.public
    assert boundary.calls[-2:] == ["wait", "close"], "its driver ends it, and tells why first"


async def test_an_orderly_stop_by_the_gateway_ends_the_boundary(
    fake: FakeGateway, boundary: ScriptedBoundary, supervise: Start
) -> None:
    outcome = asyncio.create_task(supervise())
    (await fake.sessions.get()).end(grpc.StatusCode.OK)
    assert await outcome == (ExitCode.ORDERLY, None)
    assert boundary.calls[-2:] == ["terminate_boundary", "close"]
    assert not fake.of("ReportMainProcessExit")


async def test_an_empty_command_is_a_login_shell_on_a_terminal(
    fake: FakeGateway, boundary: ScriptedBoundary, supervise: Start
) -> None:
    boundary.ended.set_result(ExitStatus.exited(0))
    await supervise(command=())
    assert boundary.spec is not None
    assert (boundary.spec.program, boundary.spec.interactive) == ("", True)


async def test_a_main_process_that_already_runs_is_adopted(
    fake: FakeGateway, boundary: ScriptedBoundary, supervise: Start
) -> None:
    boundary.snapshot = SessionSnapshot(
        generation="generation-1",
        processes=(
            ProcessSnapshot(
                process_id=PROCESS_ID, kind=ProcessKind.MAIN, terminal=False, retained_output=RetainedOutput()
            ),
        ),
    )
    boundary.ended.set_result(ExitStatus.exited(5))
    assert await supervise() == (ExitCode.ORDERLY, None)
    assert "start_agent" not in boundary.calls
    assert "wait" in boundary.calls


@pytest.mark.parametrize("error", [isolation_errors.DeniedError(WORDS), isolation_errors.AttachError(WORDS)])
async def test_a_refusal_reaches_the_gateway_and_its_words_stay_private(
    fake: FakeGateway, boundary: ScriptedBoundary, supervise: Start, error: isolation_errors.BackendError
) -> None:
    boundary.errors["attach"] = error
    code, words = await supervise()
    assert code is ExitCode.POLICY_REFUSED
    assert words is not None
    assert (words.stage, words.category) == (Stage.ATTACH, Category.POLICY_REFUSED)
    assert words.public == "isolation backend 'openshell-sandbox' refused attachment"
    assert WORDS in words.private
    *_, report = fake.reports()
    assert report.refused_before_start
    assert report.admission.state == openshell_pb2.CONFIGURATION_ADMISSION_STATE_REJECTED
    assert (report.admission.policy_version, report.admission.policy_hash) == (3, "abc")
    assert report.admission.instance_id == INSTANCE_ID
    # The user's own revision is not failed; the words go into the sandbox's log instead.
    assert not fake.of("ReportPolicyStatus")
    (pushed,) = fake.of("PushSandboxLogs")
    assert isinstance(pushed, openshell_pb2.PushSandboxLogsRequest)
    (line,) = pushed.logs
    assert (line.level, line.source) == ("ERROR", "supervisor")
    assert line.message == f"isolation backend 'openshell-sandbox' refused attachment: {WORDS}"
    assert "confirm" not in boundary.calls


async def test_a_refused_revision_that_this_start_wrote_is_failed(
    fake: FakeGateway, boundary: ScriptedBoundary, supervise: Start
) -> None:
    missing = a_configuration()
    missing.ClearField("policy")
    missing.version = 0
    fake.configurations = [missing]
    boundary.image_policy = ImagePolicy(yaml='{"version": 1}')
    boundary.errors["attach"] = isolation_errors.DeniedError(WORDS)
    await supervise()
    (status,) = fake.of("ReportPolicyStatus")
    assert isinstance(status, openshell_pb2.ReportPolicyStatusRequest)
    assert (status.version, status.status) == (4, openshell_pb2.POLICY_STATUS_FAILED)
    assert status.load_error == f"isolation backend 'openshell-sandbox' refused attachment: {WORDS}"
    assert not fake.of("PushSandboxLogs")


async def test_a_refusal_that_cannot_be_reported_is_still_the_refusal(
    fake: FakeGateway, boundary: ScriptedBoundary, supervise: Start
) -> None:
    boundary.errors["attach"] = isolation_errors.DeniedError(WORDS)
    outcome = asyncio.create_task(supervise())
    await fake.called("ReportSandboxConfiguration", 2)
    fake.failures["ReportSandboxConfiguration"] = [(grpc.StatusCode.UNAVAILABLE, "restarting")]
    fake.failures["PushSandboxLogs"] = [(grpc.StatusCode.UNIMPLEMENTED, "not built")]
    code, words = await outcome
    assert code is ExitCode.POLICY_REFUSED
    assert words is not None
    assert words.stage is Stage.ATTACH
    assert len(fake.reports()) == 3, "one bounded attempt"


@pytest.mark.parametrize(
    ("call", "error", "stage", "category", "code"),
    [
        ("attach", isolation_errors.DescriptorError(WORDS), Stage.ATTACH, Category.INFRASTRUCTURE, 69),
        ("attach", isolation_errors.UnavailableError(WORDS), Stage.ATTACH, Category.INFRASTRUCTURE, 69),
        ("open", isolation_errors.NegotiationError(WORDS), Stage.BUILD, Category.INCOMPATIBLE, 76),
        ("open", isolation_errors.DeniedError(WORDS), Stage.BUILD, Category.INFRASTRUCTURE, 69),
        ("open", isolation_errors.TransportLostError(WORDS), Stage.BUILD, Category.INFRASTRUCTURE, 69),
        ("discover_policy", isolation_errors.TerminatedError(WORDS), Stage.BUILD, Category.INFRASTRUCTURE, 69),
        ("confirm", isolation_errors.ConfirmError(WORDS), Stage.CONFIRM, Category.INFRASTRUCTURE, 69),
        ("confirm", isolation_errors.DeniedError(WORDS), Stage.CONFIRM, Category.INFRASTRUCTURE, 69),
        ("start_agent", isolation_errors.ProcessError(WORDS), Stage.START_AGENT, Category.ENTRYPOINT, 71),
        ("start_agent", isolation_errors.DeniedError(WORDS), Stage.START_AGENT, Category.POLICY_REFUSED, 77),
    ],
)
async def test_a_failure_names_its_stage_and_keeps_the_backends_words_private(
    fake: FakeGateway,
    boundary: ScriptedBoundary,
    supervise: Start,
    call: str,
    error: isolation_errors.IsolationError,
    stage: Stage,
    category: Category,
    code: int,
) -> None:
    boundary.errors[call] = error
    got, words = await supervise()
    assert int(got) == code
    assert words is not None
    assert (words.stage, words.category) == (stage, category)
    assert WORDS not in words.public
    assert error.message in words.private
    assert not any(report.refused_before_start for report in fake.reports())
    assert "terminate_boundary" not in boundary.calls
    assert "wait" not in boundary.calls


async def test_a_backend_that_does_not_fit_is_told_by_versions_alone(
    fake: FakeGateway, boundary: ScriptedBoundary, supervise: Start
) -> None:
    theirs = PeerMetadata(
        protocol_version=ProtocolVersion(major=2, minor=1),
        implementation_name=f"acme {WORDS}",
        implementation_version="visit http://evil",
    )
    with pytest.raises(isolation_errors.NegotiationError) as refused:
        negotiate(our_metadata("openshell-supervisor", "0"), theirs, peer="backend")
    boundary.errors["open"] = refused.value
    _, words = await supervise()
    assert words is not None
    assert words.public == (
        "isolation backend 'openshell-sandbox' does not fit this supervisor: "
        "it speaks isolation protocol 2.1, this side 1.0; use matching releases"
    )
    assert "visit http://evil" in words.private


async def test_a_program_that_cannot_be_started_is_named(
    fake: FakeGateway, boundary: ScriptedBoundary, supervise: Start
) -> None:
    boundary.errors["start_agent"] = isolation_errors.ProcessError(WORDS)
    _, words = await supervise(command=("/bin/missing", "--token=hunter2"))
    assert words is not None
    assert words.public == "isolation backend 'openshell-sandbox' could not start the agent's program '/bin/missing'"
    assert "hunter2" not in words.to_line()


async def test_why_a_program_cannot_be_started_is_told_without_the_words_around_it(
    fake: FakeGateway, boundary: ScriptedBoundary, supervise: Start
) -> None:
    boundary.errors["start_agent"] = isolation_errors.ProcessError(
        f"{WORDS} cannot execute /bin/missing: no such file or directory"
    )
    _, words = await supervise(command=("/bin/missing",))
    assert words is not None
    assert words.public == (
        "isolation backend 'openshell-sandbox' could not start the agent's program '/bin/missing': "
        "no such file or directory"
    )


async def test_a_boundary_lost_while_running_ends_the_supervisor(
    fake: FakeGateway, boundary: ScriptedBoundary, supervise: Start
) -> None:
    outcome = asyncio.create_task(supervise())
    await settled(await fake.sessions.get())
    boundary.ended.set_exception(isolation_errors.TransportLostError("reset"))
    code, words = await outcome
    assert code is ExitCode.INFRASTRUCTURE
    assert words is not None
    assert words.stage is Stage.RUNNING
    assert words.public == "isolation backend 'openshell-sandbox' was lost: its connection broke"
    assert not fake.of("ReportMainProcessExit")


async def test_a_gateway_that_no_longer_takes_the_token_is_asked_for_another(
    fake: FakeGateway, boundary: ScriptedBoundary, supervise: Start
) -> None:
    outcome = asyncio.create_task(supervise())
    session = await fake.sessions.get()
    await settled(session)
    fake.refreshed = [
        openshell_pb2.RefreshSandboxTokenResponse(token="gateway-token-1", sandbox_token="sandbox-token-1")
    ]
    fake.failures["ConnectSupervisor"] = [(grpc.StatusCode.UNAUTHENTICATED, "the token has expired")]
    session.end(grpc.StatusCode.UNAVAILABLE)
    await settled(await fake.sessions.get())
    assert fake.authorization_of("ConnectSupervisor")[-1] == "Bearer gateway-token-1"
    assert boundary.tokens == ["sandbox-token-1"]
    boundary.ended.set_result(ExitStatus.exited(0))
    code, _ = await outcome
    assert code is ExitCode.ORDERLY


async def test_a_defect_in_the_renewal_is_told_when_it_happens(
    fake: FakeGateway,
    boundary: ScriptedBoundary,
    supervise: Start,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def broken(_: TokenRenewal) -> None:
        raise LookupError("a defect")

    monkeypatch.setattr(TokenRenewal, "keep", broken)
    outcome = asyncio.create_task(supervise())
    await settled(await fake.sessions.get())
    told = [record for record in caplog.records if "token renewal" in record.getMessage()]
    assert [record.levelname for record in told] == ["ERROR"]
    boundary.ended.set_result(ExitStatus.exited(0))
    await outcome


async def test_a_boundary_that_starts_late_is_waited_for(
    fake: FakeGateway, boundary: ScriptedBoundary, supervise: Start
) -> None:
    boundary.errors["open"] = isolation_errors.TransportLostError("no such file")
    boundary.ended.set_result(ExitStatus.exited(0))
    outcome = asyncio.create_task(supervise())
    await fake.called("ReportSandboxConfiguration")
    del boundary.errors["open"]
    assert await outcome == (ExitCode.ORDERLY, None)


async def test_a_missing_rpc_makes_the_gateway_incompatible(
    fake: FakeGateway, boundary: ScriptedBoundary, supervise: Start
) -> None:
    fake.failures["GetSandboxProviderEnvironment"] = [(grpc.StatusCode.UNIMPLEMENTED, "unknown method")]
    code, words = await supervise()
    assert code is ExitCode.INCOMPATIBLE
    assert words is not None
    assert words.public == "the gateway does not offer GetSandboxProviderEnvironment, which this supervisor needs"


async def test_an_unreachable_gateway_is_named_with_its_cause(
    fake: FakeGateway, boundary: ScriptedBoundary, supervise: Start
) -> None:
    await fake.stop()
    code, words = await supervise()
    assert code is ExitCode.INFRASTRUCTURE
    assert words is not None
    assert words.public == f"cannot reach the gateway at {fake.url}: connection refused"
    assert words.stage is Stage.BUILD
    assert "attach" not in boundary.calls


async def test_a_defect_leaves_words_too(fake: FakeGateway, boundary: ScriptedBoundary, supervise: Start) -> None:
    boundary.spec = None
    broken = asyncio.get_running_loop().create_future()
    broken.set_exception(ZeroDivisionError("secret"))
    boundary.ended = broken
    code, words = await supervise()
    assert code is ExitCode.INTERNAL
    assert words is not None
    assert words.public == "internal error of the supervisor (ZeroDivisionError); its log has the details"
    assert boundary.calls[-2:] == ["wait", "close"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
async def test_a_signal_leaves_the_boundary_to_its_driver(
    fake: FakeGateway, boundary: ScriptedBoundary, supervise: Start, number: signal.Signals, code: int
) -> None:
    outcome = asyncio.create_task(supervise())
    session = await fake.sessions.get()
    await settled(session)
    os.kill(os.getpid(), number)
    got, words = await outcome
    assert int(got) == code
    assert words is not None
    assert (words.stage, words.public) == (Stage.RUNNING, f"ended by {number.name} from outside")
    assert boundary.calls[-2:] == ["wait", "close"]
    await session.over.wait()


async def test_a_session_that_is_refused_for_good_leaves_the_boundary_to_its_driver(
    fake: FakeGateway, boundary: ScriptedBoundary, supervise: Start
) -> None:
    outcome = asyncio.create_task(supervise())
    session = await fake.sessions.get()
    await settled(session)
    session.end(grpc.StatusCode.FAILED_PRECONDITION)
    code, words = await outcome
    assert code is ExitCode.INFRASTRUCTURE
    assert words is not None
    assert words.stage is Stage.RUNNING
    assert words.public == "the gateway refused the supervisor's session with FAILED_PRECONDITION"
    assert boundary.calls[-2:] == ["wait", "close"]


async def test_an_orderly_end_does_not_wait_for_ever_for_the_boundary(
    fake: FakeGateway,
    boundary: ScriptedBoundary,
    gateway: GrpcGateway,
    launch: LaunchMaterial,
    timing: Timing,
) -> None:
    boundary.hangs_on_terminate = True
    boundary.ended.set_result(ExitStatus.exited(0))
    supervisor = Supervisor(
        launch.inputs(fake.url), gateway=gateway, open_boundary=boundary.open, instance_id=INSTANCE_ID, timing=timing
    )
    outcome = await until_end_or_signal(supervisor, replace(timing, orderly_terminate_seconds=0.05))
    assert outcome == (ExitCode.ORDERLY, None)
    assert boundary.calls[-2:] == ["terminate_boundary", "close"]


async def test_a_signal_during_the_launch_is_obeyed_at_once(
    fake: FakeGateway, boundary: ScriptedBoundary, supervise: Start
) -> None:
    boundary.errors["open"] = isolation_errors.TransportLostError("no such file")
    outcome = asyncio.create_task(supervise())
    await fake.called("ReportSandboxConfiguration")
    os.kill(os.getpid(), signal.SIGTERM)
    code, words = await outcome
    assert code is ExitCode.TERMINATED
    assert words is not None
    assert words.public == "ended by SIGTERM from outside"
    assert words.stage is Stage.BUILD
    assert "attach" not in boundary.calls
