"""Starting a retained sandbox again (compute-driver contract 3.7 and 5.9), and finishing starts that were interrupted.

A start is accepted once its launch input is committed: from then on it is carried out in the background, across outages
of the engine and restarts of the driver, until it is ready, fails, or is stopped or deleted.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from driver_docker.concurrency import uninterrupted
from driver_docker.engine import EngineUnreachableError
from driver_docker.engine_objects import ContainerStatus
from driver_docker.errors import DriverError, InvalidRequestError, PreconditionError, SandboxNotFoundError
from driver_docker.launch import ExitBeforeReadyError, check_fence
from driver_docker.provision import come_through, failure_from, record_and_tell
from driver_docker.relaunch import Relauncher
from driver_docker.sandbox_record import RecordPhase
from driver_docker.services import now
from driver_docker.turns import LAUNCHING, end_launch, has_launch
from driver_docker.verdict import Reason

if TYPE_CHECKING:
    from driver_docker.concurrency import Background
    from driver_docker.engine_objects import ContainerFacts
    from driver_docker.exits import Exits
    from driver_docker.launch import Launcher
    from driver_docker.sandboxes import Sandbox
    from driver_docker.services import Services
    from driver_docker.stop import Stopper
    from openshell.isolation.documents import LaunchAuthentication

_GENERATION: Final = re.compile(r"[a-z0-9-]{1,64}")


class Starter:
    """Decides about starts and carries them out."""

    def __init__(
        self, services: Services, launcher: Launcher, exits: Exits, stopper: Stopper, background: Background
    ) -> None:
        self._services = services
        self._launcher = launcher
        self._relauncher = Relauncher(services, launcher)
        self._exits = exits
        self._stopper = stopper
        self._background = background

    def check_generation(self, generation: str) -> None:
        """Check the gateway's name of a start.

        Raises:
            InvalidRequestError: It is not `[a-z0-9-]{1,64}`; a gateway of the older generation sends none.
        """
        if not generation and self._services.handshake.older:
            return
        if not _GENERATION.fullmatch(generation):
            raise InvalidRequestError("generation_id must be 1 to 64 characters of a-z, 0-9 and -")

    async def start(self, sandbox: Sandbox, generation: str, launch: LaunchAuthentication | None) -> None:
        """Accept a start. To be run to its end whatever becomes of the caller.

        Args:
            sandbox: The sandbox.
            generation: The gateway's name of this start; retries of one start carry the same.
            launch: New credentials, or none.

        Raises:
            SandboxNotFoundError: It is gone or going, or its launch failed and nothing of it is left.
            PreconditionError: It runs under another generation, the revisions no longer fit, or there are no
                credentials that could be used.
            EngineUnreachableError: The engine cannot be asked.
        """
        async with sandbox.lock:
            self._check_present(sandbox)
            if sandbox.record.phase in LAUNCHING:
                self._check_under_way(sandbox, generation)
                if launch is None or not await self._supersedes(sandbox, launch):
                    self.resume(sandbox)
                    return
                await end_launch(sandbox)
                if sandbox.record.phase is RecordPhase.STARTING:
                    await self._go_on_with(sandbox, launch)
                    return
            # One that is being concluded must not act beside the next. What it has left to do follows this turn.
            await end_launch(sandbox)
            record = sandbox.record
            facts = await self._relauncher.look_at_workload(sandbox)
            if facts is None or facts.status is ContainerStatus.REMOVING:
                raise SandboxNotFoundError(
                    f"the workload container of sandbox {sandbox.sandbox_id} no longer exists; delete the sandbox and "
                    "create it again"
                )
            await self._services.gate.admit_again(record)
            if facts.status is ContainerStatus.DEAD:
                raise PreconditionError(
                    f"the engine gave the workload container of sandbox {sandbox.sandbox_id} up (state dead), and will "
                    "not start it again; delete the sandbox"
                )
            if facts.status.is_alive and record.phase is RecordPhase.ACTIVE and record.failure is None:
                await self._start_running(sandbox, generation, launch, facts)
            else:
                await self._start_ended(sandbox, generation, launch, facts)

    def _check_present(self, sandbox: Sandbox) -> None:
        if not self._services.table.holds(sandbox) or sandbox.record.phase is RecordPhase.DELETING:
            raise SandboxNotFoundError(f"sandbox {sandbox.sandbox_id} was deleted")
        if sandbox.record.phase is RecordPhase.FAILED:
            raise SandboxNotFoundError(
                f"sandbox {sandbox.sandbox_id} failed to launch and nothing of it is left to start; create it again"
            )

    @staticmethod
    def _check_under_way(sandbox: Sandbox, generation: str) -> None:
        under_way = sandbox.record.start_generation
        if under_way and generation and under_way != generation:
            raise PreconditionError(
                f"sandbox {sandbox.sandbox_id} is being started as generation {under_way}; stop it before it is "
                f"started as {generation}"
            )

    async def _start_running(
        self, sandbox: Sandbox, generation: str, launch: LaunchAuthentication | None, facts: ContainerFacts
    ) -> None:
        """The workload runs: whatever happens, it is not started again."""
        record = sandbox.record
        if record.start_generation and generation and record.start_generation != generation:
            raise PreconditionError(
                f"sandbox {sandbox.sandbox_id} runs as generation {record.start_generation}; stop it before it is "
                f"started as {generation}"
            )
        # A pause is an operator's, and no supervisor could attach in it.
        paused = facts.status is ContainerStatus.PAUSED
        replaces = False
        if launch is not None and not paused:
            kept = await self._epoch_for(sandbox, launch)
            # What a driver committed that ended before it recorded the start, no supervisor has yet.
            replaces = launch.supervisor.auth_epoch > (record.supervisor_epoch or kept)
        if generation and not record.start_generation:
            sandbox.record = record.changed(record.changed_at, start_generation=generation)
            await self._services.save(sandbox)
        sandbox.workload = facts
        if launch is None or not replaces:
            self._services.publish_snapshot(sandbox)
            return
        await self._relauncher.refresh_credentials(sandbox, launch)
        await self._accept(sandbox, generation)

    async def _epoch_for(self, sandbox: Sandbox, launch: LaunchAuthentication) -> int:
        """The epoch of the committed credentials, where these may follow them.

        A workload lets only credentials of a newer epoch take over (isolation contract 3.6 and 3.7). A supervisor that
        works is not given up for others.

        Raises:
            PreconditionError: They are older, or of another session or generation, or signed by nobody that it knows.
        """
        committed = await self._relauncher.read_committed(sandbox)
        bundle = launch.supervisor
        if (bundle.session_id, bundle.runtime_generation) != (committed.session_id, committed.generation):
            raise PreconditionError(
                f"launch_authentication is of generation {bundle.runtime_generation} and another session than the "
                f"running workload of sandbox {sandbox.sandbox_id}, of generation {committed.generation}; stop the "
                "sandbox first"
            )
        known = set(committed.verification_keys)
        if launch.gateway_id != committed.gateway_id or known.isdisjoint(launch.verification_keys):
            raise PreconditionError(
                "launch_authentication is of another gateway, or signed with another key, than the running workload "
                f"of sandbox {sandbox.sandbox_id} can check; stop the sandbox first"
            )
        if bundle.auth_epoch < committed.auth.auth_epoch:
            raise PreconditionError(
                f"launch_authentication is of epoch {bundle.auth_epoch}, but sandbox {sandbox.sandbox_id} runs with "
                f"epoch {committed.auth.auth_epoch} already; start it with newer credentials"
            )
        return committed.auth.auth_epoch

    async def _supersedes(self, sandbox: Sandbox, launch: LaunchAuthentication) -> bool:
        """Whether these are newer credentials of the session that a start under way is about."""
        if sandbox.record.phase is not RecordPhase.STARTING:
            return False
        try:
            return launch.supervisor.auth_epoch > await self._epoch_for(sandbox, launch)
        except PreconditionError:
            return False  # the start goes on as it was accepted

    async def _go_on_with(self, sandbox: Sandbox, launch: LaunchAuthentication) -> None:
        try:
            await self._relauncher.refresh_credentials(sandbox, launch)
        finally:
            self.resume(sandbox)

    async def _start_ended(
        self, sandbox: Sandbox, generation: str, launch: LaunchAuthentication | None, facts: ContainerFacts
    ) -> None:
        if facts.status.is_alive:
            # Started by somebody else, or left by a failure: it has no valid launch input, so it must end first.
            await self._stopper.stop_containers(sandbox)
            facts = sandbox.workload or facts
        check_fence(facts)
        retained = await self._relauncher.read_retained(sandbox)
        await self._launcher.resources.recheck(facts, workspace=retained.workspace_root)
        if launch is None:
            committed = await self._relauncher.read_committed(sandbox)
            committed.check_fresh(sandbox.sandbox_id)
        elif not await self._is_committed(sandbox, generation, launch):
            await self._relauncher.rotate(sandbox, launch, facts)
        await self._accept(sandbox, generation)

    async def _is_committed(self, sandbox: Sandbox, generation: str, launch: LaunchAuthentication) -> bool:
        """Whether this is a retry of a start whose launch input was committed before."""
        if sandbox.record.start_generation != generation:
            return False
        try:
            committed = await self._relauncher.read_committed(sandbox)
        except PreconditionError:
            return False
        return committed.documents.auth_bundle == launch.supervisor_json

    async def _accept(self, sandbox: Sandbox, generation: str) -> None:
        services = self._services
        before = sandbox.record
        sandbox.record = before.changed(
            now(),
            phase=RecordPhase.STARTING,
            failure=None,
            was_ready=False,
            start_generation=generation or before.start_generation,
        )
        try:
            await services.save(sandbox)
        except DriverError:
            sandbox.record = before
            raise
        services.publish_snapshot(sandbox)
        self.resume(sandbox)

    def resume(self, sandbox: Sandbox) -> None:
        """Go on with an accepted start, unless that is being done. Returns at once; nobody else may have the turn."""
        if sandbox.record.phase is RecordPhase.STARTING and not has_launch(sandbox):
            sandbox.launch_task = self._background.spawn(self._carry_out(sandbox), name=f"start {sandbox.sandbox_id}")

    async def _carry_out(self, sandbox: Sandbox) -> None:
        services = self._services
        try:
            await self._relauncher.run(sandbox)
            await come_through(services, self._exits, sandbox)
        except EngineUnreachableError as error:
            services.log_of(sandbox).warning("start goes on when the engine answers again", error=error.message)
        except Exception as error:
            if not isinstance(error, DriverError):
                services.log_of(sandbox).exception("start failed unexpectedly")
            try:
                await uninterrupted(self._conclude_failed(sandbox, error))
            finally:
                # Unlike after a failed create, the workload and its volumes are kept.
                self._background.spawn(self._exits.finish(sandbox), name=f"finish {sandbox.sandbox_id}")

    async def _conclude_failed(self, sandbox: Sandbox, error: Exception) -> None:
        """Record and tell why a start failed."""
        services = self._services
        if sandbox.record.phase is not RecordPhase.STARTING:
            return
        failure = failure_from(error)
        if not isinstance(error, ExitBeforeReadyError) and failure.reason == Reason.CONTAINER_CREATE_FAILED:
            failure = replace(failure, reason=Reason.CONTAINER_START_FAILED)
        sandbox.judged |= sandbox.container_ids
        sandbox.record = sandbox.record.changed(now(), phase=RecordPhase.ACTIVE, failure=failure)
        services.log_of(sandbox).warning("start failed", reason=failure.reason, message=failure.message)
        await record_and_tell(services, sandbox, error)
