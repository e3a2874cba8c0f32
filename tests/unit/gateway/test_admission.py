from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from gateway_embedded.admission import (
    REJECTED_TEXT,
    REPAIR_WINDOW,
    Decision,
    EffectiveConfiguration,
    Report,
    ReportedAdmission,
    WindowExpiredError,
    decide,
    with_change,
)
from gateway_embedded.errors import (
    ConflictError,
    GatewayError,
    InvalidRequestError,
    PreconditionError,
    SandboxNotFoundError,
)
from gateway_embedded.sandboxes import (
    Admission,
    AdmissionState,
    ConfigurationVersion,
    Launch,
    Phase,
    Provisioning,
    SandboxRecord,
    SandboxStatus,
)

NOW = datetime(2026, 10, 1, 12, tzinfo=UTC)
ONE = "11111111-1111-4111-8111-111111111111"
TWO = "22222222-2222-4222-8222-222222222222"
V1 = ConfigurationVersion(policy_version=1, policy_hash="a", config_revision=1, provider_env_revision=1)
V2 = replace(V1, policy_version=2, policy_hash="b", config_revision=2)
CURRENT = EffectiveConfiguration(version=V1, admitted=True)
S = AdmissionState


def known(state: S, *, instance: str = ONE, version: ConfigurationVersion = V1, error: str = "") -> Admission:
    return Admission(instance_id=instance, state=state, configuration=version, error=error)


def record(admission: Admission | None = None, **provisioning: object) -> SandboxRecord:
    limits = Provisioning(attempt_id="a", preparation_deadline=NOW + timedelta(minutes=30))
    if admission is not None:
        limits = replace(limits, admission_start_time=NOW, deadline=NOW + timedelta(seconds=300))
    return SandboxRecord(
        id="s",
        name="n",
        workspace="default",
        created_at=NOW,
        spec=b"",
        launch=Launch(generation="g", session_id="s", session_rotation=1, auth_epoch=1),
        status=SandboxStatus(phase=Phase.PROVISIONING, admission=admission),
        provisioning=replace(limits, **provisioning),  # type: ignore[arg-type]
    )


def report(
    state: int, *, instance: str = ONE, version: ConfigurationVersion = V1, expected: str = "", refused: bool = False
) -> Report:
    reported = ReportedAdmission(instance_id=instance, state=state, configuration=version)
    return Report(admission=reported, expected_instance_id=expected, refused_before_start=refused)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (Report(admission=None), "admission is required"),
        (report(S.PENDING, instance=""), "instance_id must be a UUID"),
        (report(S.PENDING, instance="not-one"), "instance_id must be a UUID"),
        (report(S.PENDING, instance=ONE.replace("-", "")), "instance_id must be a UUID"),
        (report(9), "invalid admission state"),
        (report(-1), "invalid admission state"),
        (report(S.UNSPECIFIED), "admission state is required"),
        (report(S.ACCEPTED, refused=True), "refused_before_start is only valid with a rejected admission"),
        (report(S.PENDING, refused=True), "refused_before_start is only valid with a rejected admission"),
    ],
)
def test_a_malformed_report_is_refused_before_anything_else(given: Report, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{text}$"):
        decide(given, None, CURRENT, now=NOW)


@pytest.mark.parametrize(
    ("given", "stored", "configuration", "kind", "text"),
    [
        (report(S.PENDING), None, CURRENT, SandboxNotFoundError, "sandbox not found"),
        (report(S.PENDING), record(timeout_time=NOW), CURRENT, PreconditionError,
         "provisioning repair window expired; explicitly start the sandbox after cleanup"),
        (report(S.PENDING, instance=TWO), record(known(S.ACCEPTED)), CURRENT, PreconditionError,
         "supervisor registration fence has changed"),
        (report(S.PENDING, instance=TWO, expected=TWO), record(known(S.PENDING)), CURRENT, PreconditionError,
         "supervisor registration fence has changed"),
        (report(S.ACCEPTED), record(), CURRENT, PreconditionError, "supervisor configuration instance has changed"),
        (report(S.ACCEPTED, instance=TWO), record(known(S.PENDING)), CURRENT, PreconditionError,
         "supervisor configuration instance has changed"),
        (report(S.REJECTED, instance=TWO), record(known(S.PENDING)), CURRENT, PreconditionError,
         "supervisor configuration instance has changed"),
        (report(S.ACCEPTED, version=V2), record(known(S.PENDING)), CURRENT, ConflictError,
         "configuration changed or is not admitted; fetch and validate again"),
        (report(S.ACCEPTED), record(known(S.PENDING)), replace(CURRENT, admitted=False), ConflictError,
         "configuration changed or is not admitted; fetch and validate again"),
        (report(S.REJECTED, version=V2), record(known(S.PENDING)), CURRENT, ConflictError,
         "rejected configuration generation has changed"),
        # Earlier rows win.
        (report(S.ACCEPTED, instance=TWO, version=V2), record(known(S.PENDING)), CURRENT, PreconditionError,
         "supervisor configuration instance has changed"),
        (report(S.ACCEPTED), record(known(S.PENDING), deadline=NOW), CURRENT, WindowExpiredError,
         "provisioning repair window expired"),
        (report(S.PENDING), record(preparation_deadline=NOW), CURRENT, WindowExpiredError,
         "provisioning repair window expired"),
    ],
)  # fmt: skip
def test_refused_reports(
    given: Report,
    stored: SandboxRecord | None,
    configuration: EffectiveConfiguration,
    kind: type[GatewayError],
    text: str,
) -> None:
    with pytest.raises(kind, match=f"^{text}$"):
        decide(given, stored, configuration, now=NOW)


def made(decision: Decision | None) -> Decision:
    assert decision is not None
    return decision


def test_registration_takes_the_place_of_the_expected_instance() -> None:
    first = made(decide(report(S.PENDING), record(), CURRENT, now=NOW))
    assert first.admission == known(S.PENDING)
    second = made(decide(report(S.PENDING, instance=TWO, expected=ONE), record(known(S.ACCEPTED)), CURRENT, now=NOW))
    assert second.admission == known(S.PENDING, instance=TWO)
    assert not second.activates


@pytest.mark.parametrize("state", [S.PENDING, S.ACCEPTED, S.REJECTED])
def test_a_repeated_registration_changes_nothing(state: S) -> None:
    assert decide(report(S.PENDING), record(known(state)), CURRENT, now=NOW) is None


@pytest.mark.parametrize("before", [S.PENDING, S.REJECTED, S.ACCEPTED])
def test_acceptance_activates_and_clears_the_error(before: S) -> None:
    decision = made(decide(report(S.ACCEPTED), record(known(before, error="old")), CURRENT, now=NOW))
    assert decision.admission == known(S.ACCEPTED)
    assert decision.activates
    assert not decision.refused


@pytest.mark.parametrize(
    ("configuration", "text"),
    [
        (CURRENT, REJECTED_TEXT),
        (replace(CURRENT, error="the gateway's own words"), "the gateway's own words"),
        (replace(CURRENT, error="x" * 600), "x" * 512),
        (EffectiveConfiguration(version=V2, admitted=False, buildable=False, error="broken"), "broken"),
    ],
)
def test_a_rejection_carries_the_gateways_words_only(configuration: EffectiveConfiguration, text: str) -> None:
    decision = made(decide(report(S.REJECTED), record(known(S.PENDING)), configuration, now=NOW))
    assert decision.admission == known(S.REJECTED, error=text)
    assert not decision.refused


def test_an_unflagged_rejection_keeps_what_is_in_force() -> None:
    decision = made(decide(report(S.REJECTED), record(known(S.ACCEPTED)), CURRENT, now=NOW))
    assert decision.admission == known(S.ACCEPTED, error=REJECTED_TEXT)
    assert not decision.refused


def test_a_refusal_before_start_replaces_the_acceptance() -> None:
    decision = made(decide(report(S.REJECTED, refused=True), record(known(S.ACCEPTED)), CURRENT, now=NOW))
    assert decision.admission == known(S.REJECTED, error=REJECTED_TEXT)
    assert decision.refused


def test_a_flag_for_another_configuration_is_as_if_it_were_not_there() -> None:
    stored = record(known(S.ACCEPTED, version=V2))
    decision = made(decide(report(S.REJECTED, refused=True), stored, CURRENT, now=NOW))
    assert decision.admission == known(S.ACCEPTED, version=V2, error=REJECTED_TEXT)
    assert not decision.refused


def test_the_first_report_starts_the_window_and_the_first_rejection_extends_it_once() -> None:
    first = made(decide(report(S.PENDING), record(), CURRENT, now=NOW)).provisioning
    assert (first.admission_start_time, first.deadline) == (NOW, NOW + timedelta(seconds=300))
    later = NOW + timedelta(seconds=200)
    stored = replace(record(known(S.PENDING)), provisioning=first)
    second = made(decide(report(S.REJECTED), stored, CURRENT, now=later)).provisioning
    assert (second.first_rejection_time, second.deadline) == (later, later + timedelta(seconds=300))
    stored = replace(record(known(S.REJECTED)), provisioning=second)
    third = made(decide(report(S.REJECTED), stored, CURRENT, now=later + timedelta(seconds=100))).provisioning
    assert third == second


def test_a_newer_change_extends_the_window_and_may_be_rejected_once_more() -> None:
    stored = record(known(S.PENDING))
    rejected = made(decide(report(S.REJECTED), stored, CURRENT, now=NOW)).provisioning
    at = NOW + timedelta(seconds=250)
    committed = with_change(rejected, change_id="policy:2", now=at)
    assert (committed.configuration_change_id, committed.configuration_change_time) == ("policy:2", at)
    assert (committed.deadline, committed.first_rejection_time) == (at + REPAIR_WINDOW, None)
    again = at + timedelta(seconds=299)
    stored = replace(record(known(S.REJECTED)), provisioning=committed)
    granted = made(decide(report(S.REJECTED), stored, CURRENT, now=again)).provisioning
    assert (granted.first_rejection_time, granted.deadline) == (again, again + REPAIR_WINDOW)
    # An earlier deadline never takes the place of a later one.
    assert with_change(granted, change_id="policy:3", now=at).deadline == granted.deadline


@pytest.mark.parametrize(
    "before",
    [
        record().provisioning,
        record(known(S.PENDING), deadline=NOW).provisioning,
        record(known(S.PENDING), finished=True).provisioning,
        record(known(S.PENDING), timeout_time=NOW).provisioning,
    ],
    ids=["still preparing", "over time", "was ready", "timed out"],
)
def test_a_change_moves_no_other_deadline(before: Provisioning) -> None:
    after = with_change(before, change_id="policy:2", now=NOW)
    assert after == replace(before, configuration_change_id="policy:2", configuration_change_time=NOW)


def test_no_window_applies_once_the_sandbox_was_ready() -> None:
    stored = record(known(S.ACCEPTED), finished=True, deadline=NOW - timedelta(hours=1))
    assert made(decide(report(S.REJECTED), stored, CURRENT, now=NOW)).provisioning == stored.provisioning
