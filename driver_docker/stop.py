"""Stopping a sandbox and keeping what a start needs (compute-driver contract 3.6 and 5.9).

The intent is recorded before the first container ends, so that neither a later observation nor the next driver can take
the end for a failure, and so that an interrupted stop is completed.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from driver_docker import events
from driver_docker.engine import EngineAbsentError, EngineConflictError, EngineError, EngineRefusedError
from driver_docker.engine_objects import ContainerStatus
from driver_docker.errors import DriverError, RecordError, SandboxNotFoundError
from driver_docker.sandbox_record import RecordPhase
from driver_docker.services import now
from driver_docker.teardown import remove_auxiliaries, stop_workload
from driver_docker.turns import LAUNCHING
from openshell.verdicts import Component

if TYPE_CHECKING:
    from driver_docker.exits import Exits
    from driver_docker.sandboxes import Sandbox
    from driver_docker.services import Services


class Stopper:
    """Stops sandboxes whose launch, if there was one under way, has been cancelled."""

    def __init__(self, services: Services, exits: Exits) -> None:
        self._services = services
        self._engine = services.engine
        self._exits = exits

    async def stop(self, sandbox: Sandbox) -> None:
        """Stop a sandbox that has a workload container. The caller has the turn, and has ended the launch.

        Raises:
            SandboxNotFoundError: Its workload container is gone.
            EngineUnreachableError: The engine could not be asked at all, and nothing was done.
            RecordError: The intent could not be recorded, and nothing was done.
            EngineError: The engine refused or went away in the middle. A stop that was begun is completed later, as is
                one for which a launch was given up.
        """
        services, before = self._services, sandbox.record
        given_up = before.phase in LAUNCHING
        if given_up:
            self._mark_stopping(sandbox)
            await services.save_quietly(sandbox)
            services.publish_snapshot(sandbox)
        try:
            sandbox.workload = await self._engine.inspect_container(before.workload_id)
        except EngineAbsentError:
            raise self._gone(sandbox) from None
        if sandbox.workload.status is ContainerStatus.REMOVING:
            raise _missing(sandbox)
        if before.phase is RecordPhase.STOPPED and not sandbox.workload.status.is_alive:
            services.publish_snapshot(sandbox)
            return
        if not given_up:
            await self._begin(sandbox)
        try:
            await self.complete(sandbox)
        except EngineAbsentError:
            raise self._gone(sandbox) from None

    async def _begin(self, sandbox: Sandbox) -> None:
        before, intentional = sandbox.record, frozenset(sandbox.intentional)
        self._mark_stopping(sandbox)
        try:
            await self._services.save(sandbox)
        except RecordError:
            sandbox.record, sandbox.intentional = before, set(intentional)
            if before.failure is None:
                # Both run on. An end that was seen meanwhile was taken for the stop's, and is news again.
                sandbox.judged -= sandbox.container_ids
                self._exits.look(sandbox)
            raise
        self._services.publish_snapshot(sandbox)

    @staticmethod
    def _mark_stopping(sandbox: Sandbox) -> None:
        sandbox.intentional |= sandbox.container_ids
        sandbox.record = sandbox.record.changed(now(), phase=RecordPhase.STOPPING, failure=None)
        sandbox.notify()

    async def complete(self, sandbox: Sandbox) -> None:
        """Carry a recorded stop to its end. The caller has the turn.

        Raises:
            EngineAbsentError: The workload container is gone.
            EngineError: The engine cannot be asked, or refuses.
        """
        services, supervisor = self._services, sandbox.record.supervisor_id
        sandbox.intentional |= sandbox.container_ids
        await self.stop_containers(sandbox)
        sandbox.run += 1
        sandbox.record = sandbox.record.changed(
            now(), phase=RecordPhase.STOPPED, failure=None, was_ready=False, supervisor_id=""
        )
        sandbox.forget(supervisor)
        await services.save_quietly(sandbox)  # a driver that finds it as being stopped makes the same of it
        services.publish_snapshot(sandbox)
        services.log_of(sandbox).info("sandbox stopped")

    async def stop_containers(self, sandbox: Sandbox) -> None:
        """Remove the supervisor and stop the workload, whatever state they are in.

        With it goes every other container but the workload, such as a supervisor whose creation was cut short.

        Raises:
            EngineAbsentError: The workload container is gone.
            EngineError: The engine cannot be asked, or refuses.
        """
        record, config = sandbox.record, self._services.config
        sandbox.intentional |= sandbox.container_ids
        if record.supervisor_id:
            # Gone, going or paused: the removal settles each.
            with contextlib.suppress(EngineAbsentError, EngineConflictError, EngineRefusedError):
                await self._engine.stop_container(
                    record.supervisor_id, grace_seconds=config.supervisor_stop_grace_seconds
                )
        await remove_auxiliaries(self._engine, self._services.owner, sandbox.sandbox_id)
        sandbox.workload = await stop_workload(
            self._engine, record.workload_id, grace_seconds=config.stop_grace_seconds
        )

    async def resume(self, sandbox: Sandbox) -> None:
        """Go on with a stop that was interrupted; what the engine refuses is tried again at the next look."""
        async with sandbox.lock:
            if sandbox.record.phase is not RecordPhase.STOPPING:
                return
            try:
                await self.complete(sandbox)
            except EngineAbsentError:
                self._gone(sandbox)
            except EngineError as error:
                self._services.log_of(sandbox).warning("stop not complete yet", error=error.message)

    async def stop_again(self, sandbox: Sandbox) -> None:
        """Stop a workload that somebody started while its sandbox was stopped; where this fails, a look tries again."""
        services = self._services
        async with sandbox.lock:
            record = sandbox.record
            if record.phase is not RecordPhase.STOPPED or not services.table.holds(sandbox):
                return
            try:
                if not (await self._engine.inspect_container(record.workload_id)).status.is_alive:
                    return
                message = "somebody started the workload container while the sandbox was stopped; it is stopped again"
                services.log_of(sandbox).warning(message)
                services.publish(
                    events.warning(sandbox.sandbox_id, now(), reason="StartedWhileStopped", message=message)
                )
                await self.stop(sandbox)
            except DriverError as error:
                services.log_of(sandbox).warning("workload not stopped again yet", error=error.message)

    def _gone(self, sandbox: Sandbox) -> SandboxNotFoundError:
        """What to answer where the workload container is gone; its end is news, unless the sandbox was stopped."""
        if sandbox.record.phase is RecordPhase.STOPPING:
            workload = sandbox.record.workload_id
            sandbox.workload = None
            sandbox.intentional.discard(workload)
            sandbox.judged.discard(workload)
            sandbox.record = sandbox.record.changed(now(), phase=RecordPhase.ACTIVE)
        if sandbox.record.failure is None:
            self._exits.ended(sandbox, Component.WORKLOAD)
        return _missing(sandbox)


def _missing(sandbox: Sandbox) -> SandboxNotFoundError:
    return SandboxNotFoundError(f"the workload container of sandbox {sandbox.sandbox_id} no longer exists")
