"""One launch, from the admitted backend to the end of the main process (order: isolation contract 1).

Registration at the gateway and discovery at the boundary run side by side, since neither needs the other; everything
after them is strictly in order, and nothing untrusted runs before `start_agent`.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, TypeVar

from openshell.isolation.errors import BackendError, IsolationError
from openshell.isolation.operations import ProcessKind
from openshell.verdicts import Stage
from supervisor_reference.admission import Admission, ImageDiscovery
from supervisor_reference.boundary import open_when_ready
from supervisor_reference.errors import GatewayError, PolicyDocumentError
from supervisor_reference.failures import failing_as, of_boundary
from supervisor_reference.main_process import agent_spec, report_exit
from supervisor_reference.policy import parse_image_policy, unmediated_rules
from supervisor_reference.refusal import refusal_line, report_attach_refusal
from supervisor_reference.renewal import TokenRenewal, earliest_expiry
from supervisor_reference.session import SupervisorSession

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from openshell.isolation.operations import ExitStatus, SessionSnapshot
    from supervisor_reference.admission import Admitted
    from supervisor_reference.boundary import Boundary, OpenBoundary
    from supervisor_reference.gateway import ConfigurationSnapshot, Gateway
    from supervisor_reference.launch import LaunchInputs
    from supervisor_reference.timing import Timing

_log = logging.getLogger(__name__)

_First = TypeVar("_First")
_Second = TypeVar("_Second")


class Supervisor:
    """Drives one boundary for one sandbox.

    Args:
        inputs: What it was launched with.
        gateway: The gateway.
        open_boundary: How to reach the boundary.
        instance_id: UUID of this start.
        timing: Limits and intervals.
    """

    def __init__(
        self,
        inputs: LaunchInputs,
        *,
        gateway: Gateway,
        open_boundary: OpenBoundary,
        instance_id: str,
        timing: Timing,
    ) -> None:
        self._inputs = inputs
        self._gateway = gateway
        self._open_boundary = open_boundary
        self._instance_id = instance_id
        self._timing = timing
        self._boundary: Boundary | None = None
        self._attached = False
        self._stage = Stage.BUILD
        self._admission = Admission(gateway, timing)
        self._session = SupervisorSession(
            gateway,
            sandbox_id=inputs.sandbox_id,
            instance_id=instance_id,
            health_socket=inputs.health_socket,
            timing=timing,
        )

    @property
    def stage(self) -> Stage:
        """How far this supervisor has come."""
        return Stage.RUNNING if self._session.ready.is_set() else self._stage

    async def run(self) -> None:
        """Launch, serve, and end in order: the main process ended and was reported, or the gateway asked for it.

        The boundary stays open: end with `close` in any case, and with `terminate` before it where this returned.

        Raises:
            StageError: The launch or the run failed.
        """
        registered, image = await _both(self._register(), self._discover())
        with failing_as(Stage.BUILD):
            admitted = await self._admission.admit(registered, image)
        await self._activate(admitted)

    async def terminate(self, limit_seconds: float) -> None:
        """Ask the boundary to end everything: for an orderly end only (see `process.until_end_or_signal`).

        Args:
            limit_seconds: How long it may take.
        """
        if self._boundary is None or not self._attached:
            return
        try:
            async with asyncio.timeout(limit_seconds):
                await self._boundary.terminate_boundary()
        except (IsolationError, TimeoutError) as error:
            _log.warning("the boundary did not confirm its termination: %s", str(error) or "no answer in time")

    async def close(self) -> None:
        """Cut every connection."""
        if self._boundary is not None:
            await self._boundary.close()
        await self._gateway.close()

    async def _register(self) -> ConfigurationSnapshot:
        with failing_as(Stage.BUILD):
            await self._gateway.connect()
            return await self._admission.register()

    async def _discover(self) -> ImageDiscovery:
        plan = self._inputs.plan
        with failing_as(Stage.BUILD, backend_name=plan.backend_name):
            self._boundary = await open_when_ready(
                self._open_boundary,
                plan,
                sandbox_token=self._inputs.auth.sandbox_token,
                instance_id=self._instance_id,
                timing=self._timing,
            )
            found = await self._boundary.discover_policy()
        if found.yaml is None or found.invalid:
            return ImageDiscovery(invalid=found.invalid)
        try:
            return ImageDiscovery(policy=parse_image_policy(found.yaml))
        except PolicyDocumentError as error:
            _log.error("the image's policy cannot be used: %s", error.reason)
            return ImageDiscovery(invalid=True)

    async def _activate(self, admitted: Admitted) -> None:
        boundary = self._boundary
        if boundary is None:
            raise RuntimeError("a configuration was admitted before the boundary was open")
        name = self._inputs.plan.backend_name
        self._stage = Stage.ATTACH
        snapshot = await self._attach(boundary, admitted)
        self._stage = Stage.CONFIRM
        with failing_as(Stage.CONFIRM, backend_name=name):
            confirmation = await boundary.confirm()
        _log.info("the boundary confirmed its enforcement", extra={"facts": {"generation": confirmation.generation}})
        self._stage = Stage.START_AGENT
        process_id = await self._start(boundary, admitted, snapshot)
        self._stage = Stage.READINESS
        await self._serve(boundary, admitted, process_id)

    async def _attach(self, boundary: Boundary, admitted: Admitted) -> SessionSnapshot:
        name = self._inputs.plan.backend_name
        rules = unmediated_rules(admitted.source)
        if rules:
            _log.warning(
                "egress is blocked entirely; the policy's network rules are not mediated: %s", ", ".join(rules)
            )
        try:
            snapshot = await boundary.attach(admitted.policy)
        except IsolationError as error:
            if isinstance(error, BackendError) and error.is_refusal:
                await report_attach_refusal(self._gateway, admitted, refusal_line(name, error))
            raise of_boundary(error, Stage.ATTACH, backend_name=name) from error
        self._attached = True
        return snapshot

    async def _start(self, boundary: Boundary, admitted: Admitted, snapshot: SessionSnapshot) -> str:
        """Start the main process, or adopt the one that an earlier supervisor of this generation left running."""
        running = next((one for one in snapshot.processes if one.kind is ProcessKind.MAIN), None)
        if running is not None:
            _log.warning("adopting the main process that is already there: %s", running.process_id)
            return running.process_id
        spec = agent_spec(self._inputs.main_process, workdir=self._inputs.workdir)
        environment = admitted.environment
        with failing_as(Stage.START_AGENT, backend_name=self._inputs.plan.backend_name, program=spec.program):
            started = await boundary.start_agent(
                spec,
                admitted.policy,
                provider_env_revision=environment.revision,
                provider_env=environment.environment,
                provider_files={name: content.encode() for name, content in environment.files.items()},
            )
        _log.info("the main process was started: %s", started.process_id)
        return started.process_id

    async def _serve(self, boundary: Boundary, admitted: Admitted, process_id: str) -> None:
        """Keep the session until the main process ends or the gateway asks for the stop."""
        auth = self._inputs.auth
        expires_at = earliest_expiry(auth.gateway_expires_at, auth.sandbox_expires_at)
        renewal = TokenRenewal(self._gateway, boundary, expires_at=expires_at, timing=self._timing)
        waiting = asyncio.create_task(self._wait(boundary, process_id), name="main process")
        session = asyncio.create_task(self._session.run(renew=renewal.renew), name="session")
        tasks = {
            waiting,
            session,
            asyncio.create_task(self._report_loaded(admitted), name="policy status"),
            asyncio.create_task(renewal.keep(), name="token renewal"),
        }
        for task in tasks - {waiting, session}:
            task.add_done_callback(_tell_defect)
        try:
            await asyncio.wait({waiting, session}, return_when=asyncio.FIRST_COMPLETED)
            # The process first: when both ended together, its exit code is the news.
            if waiting.done():
                await report_exit(self._gateway, waiting.result())
            else:
                session.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _wait(self, boundary: Boundary, process_id: str) -> ExitStatus:
        try:
            return await boundary.wait(process_id)
        except IsolationError as error:
            raise of_boundary(error, self.stage, backend_name=self._inputs.plan.backend_name) from error

    async def _report_loaded(self, admitted: Admitted) -> None:
        """Say that the policy revision is in force; what follows does not depend on it."""
        if admitted.generation.policy_version == 0:
            return
        try:
            await self._gateway.report_policy_loaded(admitted.generation.policy_version)
        except GatewayError as error:
            _log.warning("the policy revision in force could not be reported: %s", error.reason)


def _tell_defect(task: asyncio.Task[_First]) -> None:
    """Log at once why a task ended that nobody waits for: what it did is not done any more from here on."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("the task %r failed; the supervisor goes on without it", task.get_name(), exc_info=error)


async def _both(
    first: Coroutine[object, object, _First], second: Coroutine[object, object, _Second]
) -> tuple[_First, _Second]:
    """Run two parts side by side; the first that fails cancels the other, and its error is the one that counts."""
    try:
        async with asyncio.TaskGroup() as group:
            one = group.create_task(first)
            two = group.create_task(second)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures.exceptions[0].__cause__
    return one.result(), two.result()
