from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway_embedded import phases
from gateway_embedded.phases import BackendPhase, PhaseInputs, PhaseView, backend_phase, compose
from gateway_embedded.sandboxes import (
    Admission,
    AdmissionState,
    Condition,
    ConfigurationVersion,
    DriverSnapshot,
    Phase,
    ResolvedIdentity,
)

NOW = datetime(2026, 10, 1, 12, tzinfo=UTC)
EARLIER = NOW - timedelta(minutes=5)
CONFIGURATION = ConfigurationVersion(policy_version=1, policy_hash="h", config_revision=1, provider_env_revision=1)


def admission(state: AdmissionState, error: str = "") -> Admission:
    return Admission(instance_id="i", state=state, configuration=CONFIGURATION, error=error)


ACCEPTED = admission(AdmissionState.ACCEPTED)
PENDING = admission(AdmissionState.PENDING)
REJECTED = admission(AdmissionState.REJECTED, "no good")


def ready(status: str, reason: str = "", message: str = "") -> Condition:
    return Condition(type="Ready", status=status, reason=reason, message=message)


def seen(*conditions: Condition, deleting: bool = False, has_status: bool = True) -> DriverSnapshot:
    return DriverSnapshot(sandbox_id="s", name="n", conditions=conditions, deleting=deleting, has_status=has_status)


RUNNING = seen(ready("True", "BackendReady"))
STARTING = seen(ready("False", "Starting", "pulling"))
FAILED = seen(ready("False", "ControlSupervisorExited", "the supervisor was killed by SIGKILL (137)"))
SUSPENDED = Condition(type="Suspended", status="True")


def inputs(
    stored: Phase = Phase.PROVISIONING,
    snapshot: DriverSnapshot | None = RUNNING,
    *,
    session: bool = True,
    admitted: Admission | None = ACCEPTED,
    conditions: tuple[Condition, ...] = (),
    vouches: bool = False,
) -> PhaseInputs:
    return PhaseInputs(
        stored_phase=stored,
        stored_conditions=conditions,
        snapshot=snapshot,
        session_connected=session,
        admission=admitted,
        now=NOW,
        driver_reports_runtime_readiness=vouches,
    )


def of(view: PhaseView, kind: str = "Ready") -> Condition:
    return next((item for item in view.conditions if item.type == kind), Condition(type="", status=""))


@pytest.mark.parametrize(
    ("snapshot", "expected"),
    [
        (None, BackendPhase.UNKNOWN),
        (seen(has_status=False), BackendPhase.UNKNOWN),
        (seen(ready("True"), deleting=True), BackendPhase.DELETING),
        (seen(ready("False", "ContainerExited"), deleting=True), BackendPhase.DELETING),
        (seen(SUSPENDED), BackendPhase.STOPPED),
        (seen(Condition(type="sUSPENDED", status="TRUE")), BackendPhase.STOPPED),
        (seen(ready("False", "ContainerExited"), SUSPENDED), BackendPhase.STOPPED),
        (seen(ready("True"), SUSPENDED), BackendPhase.READY),
        (seen(ready("TRUE")), BackendPhase.READY),
        (seen(ready("Unknown", "ContainerPaused")), BackendPhase.PROVISIONING),
        (seen(), BackendPhase.PROVISIONING),
        (seen(Condition(type="ready", status="False", reason="ContainerExited")), BackendPhase.PROVISIONING),
        (seen(ready("False", "ContainerExited")), BackendPhase.ERROR),
        (seen(ready("False", "")), BackendPhase.ERROR),
        (seen(ready("False", "Deleting")), BackendPhase.ERROR),
        (seen(ready("False", "ContainerPaused")), BackendPhase.ERROR),
        (seen(ready("False", "Starting"), ready("False", "ContainerExited")), BackendPhase.PROVISIONING),
        *(
            (seen(ready("False", reason)), BackendPhase.PROVISIONING)
            for reason in (
                "ReconcilerError",
                "DependenciesNotReady",
                "SupervisorNotConnected",
                "Starting",
                "ContainerStarting",
                "ContainerCreated",
                "HealthCheckStarting",
                "InspectFailed",
                "STARTING",
            )
        ),
    ],
)
def test_backend_phase_follows_the_snapshot(snapshot: DriverSnapshot | None, expected: BackendPhase) -> None:
    assert backend_phase(snapshot) is expected


@pytest.mark.parametrize(
    ("given_inputs", "phase", "reason", "message"),
    [
        (inputs(), Phase.READY, "DependenciesReady", "Supervisor session connected"),
        (inputs(session=False), Phase.PROVISIONING, "SupervisorNotConnected",
         "Backend ready; waiting for supervisor session"),
        (inputs(session=False, vouches=True), Phase.READY, "DependenciesReady", "Driver reports the runtime as ready"),
        (inputs(snapshot=STARTING), Phase.READY, "DependenciesReady", "Supervisor session connected"),
        (inputs(snapshot=None), Phase.READY, "DependenciesReady", "Supervisor session connected"),
        (inputs(snapshot=STARTING, session=False), Phase.PROVISIONING, "Starting", "pulling"),
        (inputs(snapshot=STARTING, session=False, vouches=True), Phase.PROVISIONING, "Starting", "pulling"),
        (inputs(Phase.READY, session=False), Phase.PROVISIONING, "DependenciesNotReady",
         "Supervisor session disconnected"),
        (inputs(Phase.READY, STARTING, session=False), Phase.PROVISIONING, "DependenciesNotReady",
         "Supervisor session disconnected"),
        (inputs(conditions=(ready("False", "DependenciesNotReady", "Supervisor session disconnected"),), session=False),
         Phase.PROVISIONING, "DependenciesNotReady", "Supervisor session disconnected"),
        (inputs(snapshot=FAILED), Phase.ERROR, "ControlSupervisorExited",
         "the supervisor was killed by SIGKILL (137)"),
        (inputs(Phase.READY, FAILED), Phase.ERROR, "ControlSupervisorExited",
         "the supervisor was killed by SIGKILL (137)"),
        (inputs(Phase.UNKNOWN), Phase.READY, "DependenciesReady", "Supervisor session connected"),
        (inputs(Phase.UNSPECIFIED, session=False), Phase.PROVISIONING, "SupervisorNotConnected",
         "Backend ready; waiting for supervisor session"),
        (inputs(snapshot=seen(SUSPENDED)), Phase.STOPPED, "", ""),
        (inputs(snapshot=seen(deleting=True)), Phase.DELETING, "", ""),
        # Admission comes before activation.
        (inputs(admitted=None), Phase.PROVISIONING, "ConfigurationPending",
         "Waiting for an authenticated supervisor configuration report"),
        (inputs(admitted=None, snapshot=STARTING, session=False), Phase.PROVISIONING, "Starting", "pulling"),
        (inputs(admitted=PENDING), Phase.PROVISIONING, "ConfigurationPending",
         "Waiting for effective configuration validation before workload activation"),
        (inputs(admitted=PENDING, snapshot=STARTING, session=False), Phase.PROVISIONING, "ConfigurationPending",
         "Waiting for effective configuration validation before workload activation"),
        (inputs(admitted=REJECTED), Phase.PROVISIONING, "ConfigurationInvalid", "no good"),
        (inputs(Phase.READY, admitted=REJECTED), Phase.PROVISIONING, "ConfigurationInvalid", "no good"),
        (inputs(admitted=REJECTED, snapshot=FAILED), Phase.ERROR, "ControlSupervisorExited",
         "the supervisor was killed by SIGKILL (137)"),
        (inputs(admitted=admission(AdmissionState.ACCEPTED, "newer one is bad")), Phase.READY, "DependenciesReady",
         "Supervisor session connected"),
        # Starting leaves for Ready or Error only.
        (inputs(Phase.STARTING), Phase.READY, "DependenciesReady", "Supervisor session connected"),
        (inputs(Phase.STARTING, session=False), Phase.STARTING, "SupervisorNotConnected",
         "Backend ready; waiting for supervisor session"),
        (inputs(Phase.STARTING, admitted=PENDING), Phase.STARTING, "ConfigurationPending",
         "Waiting for effective configuration validation before workload activation"),
        (inputs(Phase.STARTING, FAILED, admitted=PENDING), Phase.ERROR, "ControlSupervisorExited",
         "the supervisor was killed by SIGKILL (137)"),
        (inputs(Phase.STARTING, seen(SUSPENDED)), Phase.STARTING, "", ""),
    ],
)  # fmt: skip
def test_public_phase_and_its_reason(given_inputs: PhaseInputs, phase: Phase, reason: str, message: str) -> None:
    view = compose(given_inputs)
    assert (view.phase, of(view).reason, of(view).message) == (phase, reason, message)
    if of(view).type:
        assert of(view).is_true is (phase is Phase.READY)
        assert view.conditions[0].type == "Ready"


@pytest.mark.parametrize("stored", [Phase.ERROR, Phase.COMPLETED, Phase.DELETING, Phase.STOPPED])
@pytest.mark.parametrize("snapshot", [RUNNING, STARTING, FAILED, None, seen(deleting=True), seen(SUSPENDED)])
@pytest.mark.parametrize("session", [True, False])
def test_ended_phases_ignore_what_is_observed(stored: Phase, snapshot: DriverSnapshot | None, session: bool) -> None:
    kept = (ready("False", "MainProcessFailed", "it failed"),)
    view = compose(inputs(stored, snapshot, session=session, conditions=kept))
    assert view.phase is stored
    assert (of(view).reason, of(view).message) == ("MainProcessFailed", "it failed")


@pytest.mark.parametrize(
    ("snapshot", "phase"),
    [
        (None, Phase.STOPPING),
        (RUNNING, Phase.STOPPING),
        (STARTING, Phase.STOPPING),
        (seen(SUSPENDED), Phase.STOPPED),
        (seen(ready("False", "ContainerExited")), Phase.STOPPED),
        (seen(ready("False", "ContainerStopped")), Phase.STOPPED),
        (seen(Condition(type="Other", status="False", reason="ContainerExited")), Phase.STOPPED),
        (seen(ready("False", "ContainerRuntimeRestart")), Phase.STOPPING),
        (seen(ready("False", "Gone"), Condition(type="Suspended", status="False", reason="PodTerminating")),
         Phase.STOPPING),
        (seen(ready("False", "Gone"), Condition(type="Suspended", status="False", reason="PodNotTerminated")),
         Phase.STOPPING),
        (seen(ready("False", "OuterFenceViolation")), Phase.ERROR),
        (seen(deleting=True), Phase.STOPPING),
    ],
)  # fmt: skip
def test_a_stop_ends_on_evidence_only(snapshot: DriverSnapshot | None, phase: Phase) -> None:
    assert compose(inputs(Phase.STOPPING, snapshot, session=False)).phase is phase


@pytest.mark.parametrize(
    ("given_admission", "ready_for_configuration", "desired"),
    [
        (None, ("", "", ""), ""),
        (PENDING, ("False", "ConfigurationPending",
                   "Waiting for effective configuration validation before workload activation"), ""),
        (ACCEPTED, ("True", "ConfigurationAccepted", ""), ""),
        (admission(AdmissionState.ACCEPTED, "newer is bad"), ("True", "ConfigurationAccepted", ""), "newer is bad"),
        (REJECTED, ("False", "ConfigurationInvalid", "no good"), ""),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stored", [Phase.PROVISIONING, Phase.ERROR, Phase.STOPPING])
def test_conditions_of_an_admission(
    stored: Phase, given_admission: Admission | None, ready_for_configuration: tuple[str, str, str], desired: str
) -> None:
    stale = Condition(type="DesiredConfigurationReady", status="False", reason="ConfigurationInvalid", message="old")
    conditions = () if given_admission is None else (stale,)
    view = compose(inputs(stored, None, admitted=given_admission, conditions=conditions))
    found = of(view, "ConfigurationReady")
    assert (found.status, found.reason, found.message) == ready_for_configuration
    wanted = of(view, "DesiredConfigurationReady")
    assert (wanted.reason, wanted.message) == (("ConfigurationInvalid", desired) if desired else ("", ""))


def test_a_resolved_identity_becomes_a_condition() -> None:
    snapshot = replace(RUNNING, identity=ResolvedIdentity(uid=1000, gid=1001))
    found = of(compose(inputs(snapshot=snapshot)), "WorkloadIdentity")
    assert (found.status, found.reason, found.message) == (
        "True", "DriverResolved", "Resolved workload UID:GID is 1000:1001"
    )  # fmt: skip


def test_a_transition_time_moves_with_the_status_only() -> None:
    before = replace(ready("False", "Starting"), transition_time=EARLIER)
    waiting = compose(inputs(session=False, conditions=(before,)))
    assert of(waiting).transition_time == EARLIER
    assert of(compose(inputs(conditions=waiting.conditions))).transition_time == NOW


def test_a_refusal_is_an_error_of_the_configuration() -> None:
    view = phases.refuse(inputs(admitted=REJECTED), "no good")
    assert (view.phase, of(view).reason, of(view).message) == (Phase.ERROR, "ConfigurationInvalid", "no good")
    assert of(view, "ConfigurationReady").reason == "ConfigurationInvalid"
    # The driver's word on the supervisor that exited because of it comes later and changes nothing.
    later = compose(inputs(view.phase, FAILED, conditions=view.conditions, admitted=REJECTED, session=False))
    assert later == view


@pytest.mark.parametrize("reason", ["ControlSupervisorExited", "ControlSupervisorStartFailed"])
def test_a_refusal_overrides_the_supervisors_exit_that_it_caused(reason: str) -> None:
    exited = (ready("False", reason, "exited with code 1"),)
    view = phases.refuse(inputs(Phase.ERROR, conditions=exited, admitted=REJECTED), "no good")
    assert (view.phase, of(view).reason) == (Phase.ERROR, "ConfigurationInvalid")


def test_a_refusal_does_not_hide_an_unrelated_end() -> None:
    failed = (ready("False", "MainProcessFailed", "Canonical main process exited with status 3"),)
    view = phases.refuse(inputs(Phase.ERROR, conditions=failed, admitted=REJECTED), "no good")
    assert of(view).reason == "MainProcessFailed"
    assert phases.refuse(inputs(Phase.DELETING, admitted=REJECTED), "no good").phase is Phase.DELETING


@pytest.mark.parametrize(
    ("code", "phase", "reason", "message"),
    [
        (0, Phase.COMPLETED, "MainProcessCompleted", "Canonical main process completed successfully"),
        (3, Phase.ERROR, "MainProcessFailed", "Canonical main process exited with status 3"),
        (-1, Phase.ERROR, "MainProcessFailed", "Canonical main process exited with status -1"),
    ],
)
def test_the_main_process_ends(code: int, phase: Phase, reason: str, message: str) -> None:
    view = phases.main_process_ended(inputs(Phase.READY), exit_code=code)
    assert (view.phase, of(view).status, of(view).reason, of(view).message) == (phase, "False", reason, message)


_conditions = st.builds(
    Condition,
    type=st.sampled_from(["Ready", "Suspended", "Bootstrapping", "Other"]),
    status=st.sampled_from(["True", "False", "Unknown", ""]),
    reason=st.sampled_from(["", "Starting", "ContainerExited", "BackendReady"]),
)
_snapshots = st.none() | st.builds(
    DriverSnapshot,
    sandbox_id=st.just("s"),
    name=st.just("n"),
    has_status=st.booleans(),
    deleting=st.booleans(),
    conditions=st.lists(_conditions, max_size=3).map(tuple),
)


@given(
    st.sampled_from(list(Phase)),
    _snapshots,
    st.booleans(),
    st.sampled_from([None, ACCEPTED, PENDING, REJECTED]),
    st.lists(_conditions, max_size=3).map(tuple),
)
def test_ready_always_means_admitted_and_connected(
    stored: Phase,
    snapshot: DriverSnapshot | None,
    session: bool,
    admitted: Admission | None,
    conditions: tuple[Condition, ...],
) -> None:
    given_inputs = inputs(stored, snapshot, session=session, admitted=admitted, conditions=conditions)
    view = compose(given_inputs)
    if view.phase is Phase.READY:
        assert session
        assert admitted is ACCEPTED
        assert of(view).is_true
    assert all(item.transition_time is not None for item in view.conditions)
    # Weighing the same facts again changes nothing.
    again = compose(replace(given_inputs, stored_phase=view.phase, stored_conditions=view.conditions))
    assert again.phase is view.phase or view.phase in (Phase.STOPPED, Phase.DELETING)
