"""What a supervisor's configuration report changes: a pure decision, rows 2 to 11 of isolation contract 4.3.

Row 1, the scope of the caller, is decided before anything here is asked.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from gateway_embedded.errors import (
    DIAGNOSTIC_LIMIT_CHARS,
    ConflictError,
    InvalidRequestError,
    PreconditionError,
    SandboxNotFoundError,
)
from gateway_embedded.sandboxes import Admission, AdmissionState, ConfigurationVersion, Provisioning, SandboxRecord

REPAIR_WINDOW = timedelta(seconds=300)
"""Time for admission and repair, counted from the first report (isolation contract 5.5)."""

INITIAL_CHANGE = "initial:"
"""How the id of a configuration change begins that came with the create request (isolation contract 5.5)."""

REJECTED_TEXT = "Effective configuration could not be activated; replace the policy or repair attached providers"
"""Gateway-authored text of a rejection: a supervisor's own words stay out of the public status (contract 4.3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveConfiguration:
    """The configuration that a sandbox should run with now, as the gateway evaluates it."""

    version: ConfigurationVersion
    admitted: bool
    """Whether the gateway itself finds nothing wrong with it."""
    error: str = ""
    buildable: bool = True
    """False when the stored parts cannot be composed at all; the tuple then means nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedAdmission:
    """A configuration report as it came in; `state` may be a number that this version does not know."""

    instance_id: str
    state: int
    configuration: ConfigurationVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One `ReportSandboxConfiguration` call."""

    admission: ReportedAdmission | None
    expected_instance_id: str = ""
    refused_before_start: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What is to be stored. `refused` says that the isolation backend turned this start down for good."""

    admission: Admission
    provisioning: Provisioning
    activates: bool = False
    refused: bool = False


class WindowExpiredError(PreconditionError):
    """The report came after the attempt's deadline; the caller of `decide` claims the timeout (row 10)."""

    def __init__(self) -> None:
        super().__init__("provisioning repair window expired")


def check_shape(report: Report) -> ReportedAdmission:
    """Rows 2 and 2b: what can be said about a report without looking at any sandbox.

    Raises:
        InvalidRequestError: A part is missing, malformed or contradicts another.
    """
    admission = report.admission
    if admission is None:
        raise InvalidRequestError("admission is required", field="admission")
    if not is_uuid(admission.instance_id):
        raise InvalidRequestError("instance_id must be a UUID", field="admission.instance_id")
    if admission.state not in set(AdmissionState):
        raise InvalidRequestError("invalid admission state", field="admission.state")
    if admission.state == AdmissionState.UNSPECIFIED:
        raise InvalidRequestError("admission state is required", field="admission.state")
    if report.refused_before_start and admission.state != AdmissionState.REJECTED:
        raise InvalidRequestError(
            "refused_before_start is only valid with a rejected admission", field="refused_before_start"
        )
    return admission


def decide(
    report: Report, record: SandboxRecord | None, configuration: EffectiveConfiguration, *, now: datetime
) -> Decision | None:
    """The change that a report asks for, or nothing when it repeats what is known (row 9).

    Args:
        report: The call.
        record: The sandbox, or nothing when none is stored.
        configuration: The configuration in effect at this moment.
        now: The time of the write.

    Raises:
        InvalidRequestError: Rows 2 and 2b.
        SandboxNotFoundError: Row 3.
        PreconditionError: Rows 4, 5 and 6.
        ConflictError: Rows 7 and 8: the configuration moved, the supervisor fetches it again.
        WindowExpiredError: Row 10.
    """
    reported = check_shape(report)
    if record is None:
        raise SandboxNotFoundError("sandbox not found")
    if record.provisioning.timeout_time is not None:
        raise PreconditionError(
            "provisioning repair window expired; explicitly start the sandbox after cleanup",
            reason="PROVISIONING_WINDOW_EXPIRED",
        )
    current = record.status.admission
    state = AdmissionState(reported.state)
    if state is AdmissionState.PENDING:
        admission = _register(report, reported, current)
        if admission is None:
            return None
        return Decision(admission=admission, provisioning=_in_window(record, state, now))
    if current is None or current.instance_id != reported.instance_id:
        raise PreconditionError(
            "supervisor configuration instance has changed", reason="CONFIGURATION_INSTANCE_CHANGED"
        )
    if state is AdmissionState.ACCEPTED:
        if not configuration.admitted or configuration.version != reported.configuration:
            raise ConflictError(
                "configuration changed or is not admitted; fetch and validate again", reason="CONFIGURATION_CHANGED"
            )
        accepted = Admission(
            instance_id=reported.instance_id, state=AdmissionState.ACCEPTED, configuration=reported.configuration
        )
        return Decision(admission=accepted, provisioning=_in_window(record, state, now), activates=True)
    return _reject(report, reported, current, record, configuration, now)


def _register(report: Report, reported: ReportedAdmission, current: Admission | None) -> Admission | None:
    if current is not None:
        if current.instance_id == reported.instance_id:
            return None
        if current.instance_id != report.expected_instance_id:
            raise PreconditionError(
                "supervisor registration fence has changed", reason="SUPERVISOR_REGISTRATION_FENCED"
            )
    return Admission(
        instance_id=reported.instance_id, state=AdmissionState.PENDING, configuration=reported.configuration
    )


def _reject(
    report: Report,
    reported: ReportedAdmission,
    current: Admission,
    record: SandboxRecord,
    configuration: EffectiveConfiguration,
    now: datetime,
) -> Decision:
    if configuration.buildable and configuration.version != reported.configuration:
        raise ConflictError("rejected configuration generation has changed", reason="CONFIGURATION_CHANGED")
    error = (configuration.error or REJECTED_TEXT)[:DIAGNOSTIC_LIMIT_CHARS]
    provisioning = _in_window(record, AdmissionState.REJECTED, now)
    accepted = current.state is AdmissionState.ACCEPTED
    refused = report.refused_before_start and accepted and current.configuration == reported.configuration
    if accepted and not refused:
        return Decision(admission=replace(current, error=error), provisioning=provisioning)
    admission = Admission(
        instance_id=reported.instance_id,
        state=AdmissionState.REJECTED,
        configuration=reported.configuration,
        error=error,
    )
    return Decision(admission=admission, provisioning=provisioning, refused=refused)


def _in_window(record: SandboxRecord, state: AdmissionState, now: datetime) -> Provisioning:
    """Rows 10 and 11: the first report starts the window, the first rejection of a change extends it once."""
    provisioning = record.provisioning
    if provisioning.finished:
        return provisioning
    due = provisioning.next_deadline
    if due is not None and now >= due:
        raise WindowExpiredError
    if provisioning.admission_start_time is None:
        provisioning = replace(provisioning, admission_start_time=now, deadline=now + REPAIR_WINDOW)
    if state is AdmissionState.REJECTED and provisioning.first_rejection_time is None:
        extended = now + REPAIR_WINDOW
        deadline = extended if provisioning.deadline is None else max(provisioning.deadline, extended)
        provisioning = replace(provisioning, first_rejection_time=now, deadline=deadline)
    return provisioning


def with_change(provisioning: Provisioning, *, change_id: str, now: datetime) -> Provisioning:
    """The attempt after a newer configuration was committed (isolation contract 5.5).

    It has at least `REPAIR_WINDOW` from now on to be admitted, and its first rejection grants as much once more. That
    neither moves the absolute deadline of the preparation nor revives an attempt that is over time.
    """
    due = provisioning.next_deadline
    changed = replace(provisioning, configuration_change_id=change_id, configuration_change_time=now)
    if due is None or now >= due:
        return changed
    changed = replace(changed, first_rejection_time=None)
    if provisioning.admission_start_time is None:
        return changed
    return replace(changed, deadline=max(due, now + REPAIR_WINDOW))


def is_uuid(text: str) -> bool:
    """Whether a text is a hyphenated UUID, as every instance id is (isolation contract 4.1)."""
    try:
        return str(uuid.UUID(text)) == text.lower()
    except ValueError:
        return False
