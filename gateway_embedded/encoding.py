"""Between wire messages and the gateway's records."""

from __future__ import annotations

from datetime import UTC, datetime

from google.protobuf.timestamp_pb2 import Timestamp

from gateway_embedded.admission import EffectiveConfiguration, ReportedAdmission
from gateway_embedded.sandboxes import (
    Admission,
    Condition,
    ConfigurationVersion,
    DriverSnapshot,
    PlatformEvent,
    PolicyRevision,
    Provisioning,
    ResolvedIdentity,
    SandboxRecord,
)
from openshell.wire.compute.v1 import compute_driver_pb2
from openshell.wire.datamodel.v1 import datamodel_pb2
from openshell.wire.sandbox.v1 import sandbox_pb2
from openshell.wire.v1 import openshell_pb2


class TimestampRangeError(ValueError):
    """A peer sent a time outside of what can be represented; the message that carries it is dropped (3.11)."""


def to_timestamp(moment: datetime) -> Timestamp:
    """A time as it travels."""
    stamp = Timestamp()
    stamp.FromDatetime(moment)
    return stamp


def to_time(stamp: Timestamp) -> datetime:
    """A time as it came.

    Raises:
        TimestampRangeError: It lies outside of the years 1 to 9999.
    """
    try:
        return stamp.ToDatetime(tzinfo=UTC)
    except (ValueError, OverflowError) as error:
        raise TimestampRangeError(f"timestamp of {stamp.seconds} seconds is out of range") from error


def to_sandbox(record: SandboxRecord) -> openshell_pb2.Sandbox:
    """The public form of a record."""
    meta = datamodel_pb2.ObjectMeta(
        id=record.id,
        name=record.name,
        labels=record.labels,
        annotations=record.annotations,
        resource_version=record.resource_version,
        workspace=record.workspace,
        created_time=to_timestamp(record.created_at),
    )
    status = record.status
    if status.deletion_time is not None:
        meta.deletion_time.CopyFrom(to_timestamp(status.deletion_time))
    public = openshell_pb2.SandboxStatus(
        agent_pod=status.agent_pod,
        agent_fd=status.agent_fd,
        sandbox_fd=status.sandbox_fd,
        conditions=[_to_condition(condition) for condition in status.conditions],
        phase=openshell_pb2.SandboxPhase.ValueType(status.phase),
        current_policy_version=status.current_policy_version,
        main_process_instance_id=status.main_process_instance_id,
        provisioning=_to_provisioning(record.provisioning),
    )
    if status.exit_code is not None:
        public.exit_code = status.exit_code
    if status.admission is not None:
        public.configuration_admission.CopyFrom(_to_admission(status.admission))
    if status.configuration_activated is not None:
        public.configuration_activated = status.configuration_activated
    if status.main_process_started_time is not None:
        public.main_process_started_time.CopyFrom(to_timestamp(status.main_process_started_time))
    spec = openshell_pb2.SandboxSpec.FromString(record.spec)
    return openshell_pb2.Sandbox(metadata=meta, spec=spec, status=public)


def to_platform_event(event: PlatformEvent) -> openshell_pb2.PlatformEvent:
    """The public form of an event; its metadata travels verbatim."""
    public = openshell_pb2.PlatformEvent(
        source=event.source, type=event.type, reason=event.reason, message=event.message, metadata=event.metadata
    )
    if event.event_time is not None:
        public.event_time.CopyFrom(to_timestamp(event.event_time))
    return public


def to_configuration(
    record: SandboxRecord, configuration: EffectiveConfiguration, revision: PolicyRevision | None
) -> sandbox_pb2.GetSandboxConfigResponse:
    """The configuration a supervisor starts with and a user may read."""
    admission = record.status.admission
    version = configuration.version
    answer = sandbox_pb2.GetSandboxConfigResponse(
        version=version.policy_version,
        policy_hash=version.policy_hash,
        config_revision=version.config_revision,
        policy_source=sandbox_pb2.POLICY_SOURCE_SANDBOX,
        provider_env_revision=version.provider_env_revision,
        workspace=record.workspace,
        configuration_admitted=configuration.admitted,
        configuration_instance_id="" if admission is None else admission.instance_id,
        configuration_error=configuration.error,
    )
    if revision is not None and configuration.buildable:
        answer.policy.ParseFromString(revision.policy)
    return answer


def from_driver_sandbox(message: compute_driver_pb2.DriverSandbox) -> DriverSnapshot:
    """A driver's observation.

    Raises:
        TimestampRangeError: A transition time is out of range.
    """
    status = message.status
    identity = None
    if status.HasField("resolved_identity"):
        identity = ResolvedIdentity(uid=status.resolved_identity.uid, gid=status.resolved_identity.gid)
    return DriverSnapshot(
        sandbox_id=message.id,
        name=message.name,
        has_status=message.HasField("status"),
        deleting=status.deleting,
        conditions=tuple(_from_condition(condition) for condition in status.conditions),
        instance_id=status.instance_id,
        agent_fd=status.agent_fd,
        sandbox_fd=status.sandbox_fd,
        identity=identity,
    )


def from_driver_event(message: compute_driver_pb2.DriverPlatformEvent) -> PlatformEvent:
    """A driver's event.

    Raises:
        TimestampRangeError: The event's time is out of range.
    """
    return PlatformEvent(
        source=message.source,
        type=message.type,
        reason=message.reason,
        message=message.message,
        metadata=dict(message.metadata),
        event_time=to_time(message.event_time) if message.HasField("event_time") else None,
    )


def from_admission(message: openshell_pb2.SandboxConfigurationAdmission) -> ReportedAdmission:
    """A supervisor's report, its state unchecked."""
    return ReportedAdmission(
        instance_id=message.instance_id,
        state=int(message.state),
        configuration=ConfigurationVersion(
            policy_version=message.policy_version,
            policy_hash=message.policy_hash,
            config_revision=message.config_revision,
            provider_env_revision=message.provider_env_revision,
        ),
    )


def _to_condition(condition: Condition) -> openshell_pb2.SandboxCondition:
    public = openshell_pb2.SandboxCondition(
        type=condition.type, status=condition.status, reason=condition.reason, message=condition.message
    )
    if condition.transition_time is not None:
        public.transition_time.CopyFrom(to_timestamp(condition.transition_time))
    return public


def _from_condition(message: compute_driver_pb2.DriverCondition) -> Condition:
    return Condition(
        type=message.type,
        status=message.status,
        reason=message.reason,
        message=message.message,
        transition_time=to_time(message.transition_time) if message.HasField("transition_time") else None,
    )


def _to_admission(admission: Admission) -> openshell_pb2.SandboxConfigurationAdmission:
    return openshell_pb2.SandboxConfigurationAdmission(
        instance_id=admission.instance_id,
        state=openshell_pb2.ConfigurationAdmissionState.ValueType(admission.state),
        policy_version=admission.configuration.policy_version,
        policy_hash=admission.configuration.policy_hash,
        config_revision=admission.configuration.config_revision,
        provider_env_revision=admission.configuration.provider_env_revision,
        error=admission.error,
    )


def _to_provisioning(provisioning: Provisioning) -> openshell_pb2.SandboxProvisioning:
    public = openshell_pb2.SandboxProvisioning(
        attempt_id=provisioning.attempt_id,
        configuration_change_id=provisioning.configuration_change_id,
        cleanup_error=provisioning.cleanup_error,
    )
    times = {
        "configuration_change_time": provisioning.configuration_change_time,
        "first_rejection_time": provisioning.first_rejection_time,
        "deadline": provisioning.deadline,
        "timeout_time": provisioning.timeout_time,
        "cleanup_completed_time": provisioning.cleanup_completed_time,
        "preparation_deadline": provisioning.preparation_deadline,
        "admission_start_time": provisioning.admission_start_time,
    }
    for name, moment in times.items():
        if moment is not None:
            getattr(public, name).CopyFrom(to_timestamp(moment))
    return public
