"""Provisioning: from an accepted create to a sandbox that is ready, or to a failure that is remembered.

Unlike after a failed start, nothing is kept of a launch that failed but its record (compute-driver contract 3.5, 5.4).
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

from driver_docker import events, log_secrets, names
from driver_docker.concurrency import uninterrupted
from driver_docker.engine import EngineAbsentError, EngineError
from driver_docker.engine_objects import ContainerStatus
from driver_docker.errors import DriverError, RecordError, SandboxExistsError
from driver_docker.exits import failure_of
from driver_docker.launch import ExitBeforeReadyError
from driver_docker.launch_steps import as_failure
from driver_docker.records import LAUNCH_FILES
from driver_docker.sandbox_record import Failure, RecordPhase, SandboxRecord
from driver_docker.services import now
from driver_docker.teardown import remove_sandbox
from driver_docker.turns import LAUNCHING, end_launch
from openshell.verdicts import Component

if TYPE_CHECKING:
    from driver_docker.concurrency import Background
    from driver_docker.exits import Exits
    from driver_docker.launch import Launcher
    from driver_docker.postmortem import Exit
    from driver_docker.requests import LaunchRequest
    from driver_docker.sandboxes import Sandbox
    from driver_docker.services import Services
    from openshell.isolation.documents import LaunchAuthentication


class Provisioner:
    """Reserves sandboxes and launches them."""

    def __init__(self, services: Services, launcher: Launcher, exits: Exits, background: Background) -> None:
        self._services = services
        self._launcher = launcher
        self._exits = exits
        self._background = background

    async def create(self, request: LaunchRequest, launch: LaunchAuthentication) -> None:
        """Reserve a sandbox and begin its launch. To be run to its end whatever becomes of the caller.

        Raises:
            SandboxExistsError: The id is taken.
            EngineError: A failed sandbox has the id, and something of it is left that cannot be removed.
            RecordError: The reservation could not be recorded; nothing is left.
        """
        services = self._services
        taken = services.table.by_id(request.sandbox_id)
        if taken is not None and taken.record.phase is not RecordPhase.FAILED:
            # Said at once: whoever has its turn may take long.
            raise SandboxExistsError(f"sandbox {request.sandbox_id} already exists; delete it before creating it again")
        async with services.table.lock_of(request.sandbox_id):
            await self._give_way(request.sandbox_id)
            sandbox = services.table.add(self._reservation(request, launch))
            try:
                sandbox.secrets = log_secrets.of_bundle(launch.supervisor)
                await services.save(sandbox)
            except BaseException:
                with contextlib.suppress(RecordError):
                    await uninterrupted(services.remove_record(sandbox.sandbox_id))
                services.table.discard(sandbox)  # whatever it was: a reservation without a launch would never end
                raise
            services.publish(events.scheduled(sandbox.sandbox_id, now(), image=request.image))
            services.publish_snapshot(sandbox)
            sandbox.launch_task = self._background.spawn(
                self._launch(sandbox, request, launch), name=f"launch {sandbox.sandbox_id}"
            )

    def _reservation(self, request: LaunchRequest, launch: LaunchAuthentication) -> SandboxRecord:
        return SandboxRecord(
            sandbox_id=request.sandbox_id,
            name=request.name,
            workspace=request.workspace,
            phase=RecordPhase.PROVISIONING,
            changed_at=now(),
            generation=launch.supervisor.runtime_generation,
            image_reference=request.image,
            isolation_backend=self._services.config.backend_name,
            container_name=names.workload_container_name(
                workspace=request.workspace, name=request.name, sandbox_id=request.sandbox_id
            ),
        )

    async def _give_way(self, sandbox_id: str) -> None:
        """Let a new sandbox take the id of a failed one, of which nothing is left (compute-driver contract 3.5).

        Raises:
            EngineError: Something is left and cannot be removed.
        """
        services = self._services
        failed = services.table.by_id(sandbox_id)
        if failed is None or failed.record.phase is not RecordPhase.FAILED:
            return
        await end_launch(failed)
        await remove_sandbox(services.engine, services.owner, sandbox_id, failed.container_ids)
        await services.remove_files(failed, LAUNCH_FILES)
        services.table.discard(failed)

    async def _launch(self, sandbox: Sandbox, request: LaunchRequest, launch: LaunchAuthentication) -> None:
        services = self._services
        try:
            await self._launcher.launch(sandbox, request, launch)
            await come_through(services, self._exits, sandbox)
        except Exception as error:
            if not isinstance(error, DriverError):
                services.log_of(sandbox).exception("launch failed unexpectedly")
            if isinstance(error, ExitBeforeReadyError) and error.exit.was_ready:
                await uninterrupted(self._conclude_ended(sandbox, error.exit))
                return
            try:
                await uninterrupted(self.conclude_failed(sandbox, error))
            finally:
                self._background.spawn(self.clear_failed(sandbox), name=f"clear {sandbox.sandbox_id}")

    async def _conclude_ended(self, sandbox: Sandbox, ended: Exit) -> None:
        """Take a supervisor that was ready and ended before this driver saw it ready for any other one that ended.

        It was told to the gateway, and to the user, as ready: what was worked on is not removed.
        """
        if sandbox.record.phase is not RecordPhase.PROVISIONING:
            return  # a delete has taken over
        sandbox.record = sandbox.record.changed(now(), phase=RecordPhase.ACTIVE, was_ready=True)
        await self._services.save_quietly(sandbox)
        self._exits.look(sandbox)
        self._exits.ended(sandbox, ended.verdict.component)

    async def conclude_failed(self, sandbox: Sandbox, error: Exception) -> None:
        """Record and tell why a launch failed; the failed record stays until it is deleted."""
        services = self._services
        if sandbox.record.phase is not RecordPhase.PROVISIONING:
            return  # a delete has taken over
        failure = failure_from(error)
        sandbox.intentional |= sandbox.container_ids
        sandbox.record = sandbox.record.changed(now(), phase=RecordPhase.FAILED, failure=failure)
        sandbox.workload = None
        services.log_of(sandbox).warning("launch failed", reason=failure.reason, message=failure.message)
        await record_and_tell(services, sandbox, error)

    async def clear_failed(self, sandbox: Sandbox) -> None:
        """Take a turn to remove what a failed launch left; a look tries it again while it fails."""
        async with sandbox.lock:
            if self._services.table.holds(sandbox) and sandbox.record.phase is RecordPhase.FAILED:
                await self.clear(sandbox)

    async def clear(self, sandbox: Sandbox) -> None:
        """Remove what a failed launch left in the engine and on disk. The caller holds the lock."""
        services = self._services
        files_gone = await services.remove_files(sandbox, LAUNCH_FILES)  # secrets go even while the engine is away
        try:
            await remove_sandbox(services.engine, services.owner, sandbox.sandbox_id, sandbox.container_ids)
        except EngineError as error:
            services.log_of(sandbox).error("failed launch not removed yet", error=error.message)
            return
        told = sandbox.record.workload_id
        sandbox.record = replace(sandbox.record, workload_id="", supervisor_id="")
        await services.save_quietly(sandbox)
        if told:
            services.publish_snapshot(sandbox)  # it names a container no more
        sandbox.cleared = files_gone


def failure_from(error: Exception) -> Failure:
    """What the record and the condition say of whatever ended a launch or start; nobody was told of it yet."""
    if isinstance(error, ExitBeforeReadyError):
        return failure_of(error.exit.verdict)
    reason, message = as_failure(error)
    return Failure(reason=reason, message=message, at=now(), untold=True)


async def record_and_tell(services: Services, sandbox: Sandbox, error: Exception) -> None:
    """Write the failure of a launch or start that is in the record, and what a container that ended left; then tell it.

    Written first: what is evidence of it in the engine is about to be removed.
    """
    if isinstance(error, ExitBeforeReadyError):
        await services.record_exit(sandbox, error.exit.verdict, error.exit.tail)
    else:
        await services.save_quietly(sandbox)
    if services.tell_failure(sandbox):
        await services.save_quietly(sandbox)


async def come_through(services: Services, exits: Exits, sandbox: Sandbox) -> None:
    """Conclude a launch or start whose supervisor is healthy. What the engine says of the workload decides nothing.

    Raises:
        RecordError: It could not be recorded, so it is not told, and has not come through.
    """
    gone = False
    try:
        sandbox.workload = await services.engine.inspect_container(sandbox.record.workload_id)
    except EngineAbsentError:
        gone, sandbox.workload = True, None
    except EngineError as error:
        # It was started, and its end was not seen. The next look says how it really is.
        services.log_of(sandbox).warning("workload could not be looked at", error=error.message)
        if sandbox.workload is not None:
            sandbox.workload = replace(sandbox.workload, status=ContainerStatus.RUNNING)
    await uninterrupted(_conclude_ready(services, exits, sandbox))
    if gone:
        exits.ended(sandbox, Component.WORKLOAD)


async def _conclude_ready(services: Services, exits: Exits, sandbox: Sandbox) -> None:
    """Record that a launch or start came through, then tell it: no later driver may take back what was told.

    Raises:
        RecordError: It could not be recorded, so it is not told, and has not come through.
    """
    before = sandbox.record
    if before.phase not in LAUNCHING:
        return  # a delete has taken over
    ready = sandbox.record = before.changed(now(), phase=RecordPhase.ACTIVE, was_ready=True)
    try:
        await services.save(sandbox)
    except RecordError:
        if sandbox.record is ready:
            sandbox.record = before
            raise
        return  # a container ended meanwhile, which was told
    if sandbox.record.phase is RecordPhase.ACTIVE and sandbox.record.failure is None:
        services.publish(events.started(sandbox.sandbox_id, now(), container_name=sandbox.record.container_name))
        services.publish_snapshot(sandbox)
    exits.look(sandbox)
