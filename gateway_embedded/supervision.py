"""What supervisors report about their sandboxes, and the configuration that they get (isolation contract 4)."""

from __future__ import annotations

from dataclasses import replace

import structlog

from gateway_embedded import admission, encoding, phases, policies
from gateway_embedded.admission import Report, WindowExpiredError
from gateway_embedded.auth import SandboxPrincipal
from gateway_embedded.deadlines import DeadlineKeeper
from gateway_embedded.errors import InvalidRequestError, PreconditionError, SandboxNotFoundError, public_text
from gateway_embedded.sandboxes import AdmissionState, Phase, PolicyState, SandboxRecord
from gateway_embedded.states import SandboxStates, with_view
from openshell.wire.sandbox.v1 import sandbox_pb2
from openshell.wire.v1 import openshell_pb2


class Supervision:
    """The supervisor-facing half of the gateway; every method has checked that the caller owns the sandbox."""

    def __init__(self, states: SandboxStates, deadlines: DeadlineKeeper) -> None:
        self._states = states
        self._deadlines = deadlines
        self._log = structlog.get_logger("gateway.supervision")

    async def record_of(self, principal: SandboxPrincipal) -> SandboxRecord:
        """The sandbox of a supervisor whose launch is the stored one.

        Raises:
            SandboxNotFoundError: It was deleted.
            UnauthenticatedError: The credentials are of an earlier launch.
        """
        record = await self._states.store.get(principal.sandbox_id)
        if record is None:
            raise SandboxNotFoundError("sandbox not found")
        principal.require_launch(record)
        return record

    async def configuration(self, record: SandboxRecord) -> sandbox_pb2.GetSandboxConfigResponse:
        """The effective configuration of a sandbox."""
        revisions = await self._states.store.policies(record.id)
        effective = policies.effective_configuration(record, revisions)
        return encoding.to_configuration(record, effective, revisions[-1] if revisions else None)

    async def provider_environment(self, record: SandboxRecord) -> openshell_pb2.GetSandboxProviderEnvironmentResponse:
        """The environment that providers add: none, as no provider can be attached."""
        revisions = await self._states.store.policies(record.id)
        return openshell_pb2.GetSandboxProviderEnvironmentResponse(
            provider_env_revision=policies.NO_PROVIDERS_REVISION,
            policy_hash=revisions[-1].policy_hash if revisions else "",
            supports_stable_placeholder_environment_keys=True,
        )

    async def report_configuration(self, principal: SandboxPrincipal, report: Report) -> None:
        """Apply a configuration report.

        Raises:
            GatewayError: One of the rows of isolation contract 4.3.
        """
        admission.check_shape(report)
        record = await self.record_of(principal)
        revisions = await self._states.store.policies(record.id)

        def decide(found: SandboxRecord) -> SandboxRecord | None:
            principal.require_launch(found)
            effective = policies.effective_configuration(found, revisions)
            decision = admission.decide(report, found, effective, now=self._states.clock())
            if decision is None:
                return None
            changed = replace(found, provisioning=decision.provisioning).with_status(admission=decision.admission)
            if decision.activates:
                changed = changed.with_status(configuration_activated=True)
            if decision.refused:
                return with_view(changed, phases.refuse(self._states.inputs(changed), decision.admission.error))
            return self._states.composed(changed)

        try:
            changed = await self._states.change(record.id, decide)
        except WindowExpiredError:
            await self._deadlines.expire(record.id)
            raise
        reported = changed.status.admission
        if reported is not None and reported.state is not AdmissionState.PENDING:
            self._log.info(
                "configuration reported", sandbox_id=record.id, state=reported.state.name, error=reported.error
            )

    async def report_policy_status(
        self, record: SandboxRecord, request: openshell_pb2.ReportPolicyStatusRequest
    ) -> None:
        """Record whether a policy revision could be loaded (isolation contract 4.5).

        Raises:
            InvalidRequestError: The version is missing or the status is not a result.
            SandboxNotFoundError: There is no such revision.
        """
        if not request.version:
            raise InvalidRequestError("version is required", field="version")
        if request.status not in (openshell_pb2.POLICY_STATUS_LOADED, openshell_pb2.POLICY_STATUS_FAILED):
            raise InvalidRequestError("status must be LOADED or FAILED", field="status")
        state = PolicyState(request.status)
        error = public_text(request.load_error) if request.load_error else ""
        stored = await self._states.store.set_policy_state(
            record.id, request.version, state, load_error=error, now=self._states.clock()
        )
        if not stored:
            raise SandboxNotFoundError("policy revision not found", reason="POLICY_REVISION_NOT_FOUND")
        if state is PolicyState.LOADED:
            await self._states.change(
                record.id, lambda found: found.with_status(current_policy_version=request.version)
            )

    async def write_back_policy(
        self, record: SandboxRecord, request: openshell_pb2.UpdateConfigRequest
    ) -> openshell_pb2.UpdateConfigResponse:
        """Store the policy that a supervisor found in the image, or the default (isolation contract 4.2, step 4).

        The caller has checked the request.

        Raises:
            ConflictError: Another revision was stored meanwhile.
        """
        revisions = await self._states.store.policies(record.id)
        revision = policies.next_revision(
            record, revisions, request.policy, provenance=dict(request.annotations), now=self._states.clock()
        )
        if revision is None:
            newest = revisions[-1]
            return openshell_pb2.UpdateConfigResponse(version=newest.version, policy_hash=newest.policy_hash)
        await self._states.store.add_policy(revision)

        def commit(found: SandboxRecord) -> SandboxRecord:
            change = f"policy:{revision.version}"
            provisioning = admission.with_change(found.provisioning, change_id=change, now=self._states.clock())
            moved = found.with_status(config_revision=found.status.config_revision + 1)
            return replace(moved, provisioning=provisioning)

        await self._states.change(record.id, commit)
        self._log.info("UpdateConfig: new policy version persisted", sandbox_id=record.id, version=revision.version)
        return openshell_pb2.UpdateConfigResponse(version=revision.version, policy_hash=revision.policy_hash)

    async def session_opened(self, sandbox_id: str, instance_id: str) -> None:
        """A supervisor connected: its instance is the one whose main process counts from now on."""

        def decide(found: SandboxRecord) -> SandboxRecord:
            started = found.status.main_process_started_time
            if found.status.main_process_instance_id != instance_id or started is None:
                started = self._states.clock()
            joined = found.with_status(main_process_instance_id=instance_id, main_process_started_time=started)
            return self._states.composed(joined)

        await self._states.change(sandbox_id, decide)

    async def session_closed(self, sandbox_id: str) -> None:
        """A supervisor's session is over."""
        await self._states.recompose(sandbox_id)

    async def report_main_process_exit(
        self, record: SandboxRecord, request: openshell_pb2.ReportMainProcessExitRequest
    ) -> None:
        """Record the main process's exit: Completed for 0, Error for any other code.

        Raises:
            PreconditionError: It comes from another supervisor instance, or contradicts an earlier report.
        """

        def decide(found: SandboxRecord) -> SandboxRecord | None:
            _require_instance(found, request.instance_id)
            if found.status.exit_code is not None:
                if found.status.exit_code != request.exit_code:
                    raise PreconditionError(
                        f"the main process was already reported to have exited with {found.status.exit_code}"
                    )
                return None
            ended = found.with_status(exit_code=request.exit_code, main_process_instance_id=request.instance_id)
            if found.status.phase in phases.ENDED or found.status.phase is Phase.STOPPING:
                return ended
            return with_view(ended, phases.main_process_ended(self._states.inputs(ended), exit_code=request.exit_code))

        await self._states.change(record.id, decide)
        self._log.info("main process exited", sandbox_id=record.id, exit_code=request.exit_code)

    async def finalize_main_process_exit(
        self, record: SandboxRecord, request: openshell_pb2.FinalizeMainProcessExitRequest
    ) -> None:
        """Record that everything the main process wrote was delivered; repeats are no fault.

        Raises:
            PreconditionError: No exit was reported, or by another supervisor instance.
        """

        def decide(found: SandboxRecord) -> SandboxRecord:
            _require_instance(found, request.instance_id)
            if found.status.exit_code is None:
                raise PreconditionError("no main process exit was reported for this sandbox")
            return found.with_status(exit_finalized=True)

        await self._states.change(record.id, decide)


def _require_instance(record: SandboxRecord, instance_id: str) -> None:
    """A report counts only from the instance that connected or that registered its configuration."""
    if not instance_id:
        raise InvalidRequestError("instance_id is required", field="instance_id")
    admitted = record.status.admission
    known = {record.status.main_process_instance_id, "" if admitted is None else admitted.instance_id}
    if instance_id not in known:
        raise PreconditionError("supervisor instance has changed", reason="SUPERVISOR_INSTANCE_CHANGED")
