"""Stopping a sandbox and keeping what a start needs (compute-driver contract 3.6 and 5.9).

The intent is recorded before the first container ends, so that neither a later observation nor the next driver can take
the end for a failure, and so that an interrupted stop is completed.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from driver_docker.engine import (
    ContainerStatus,
    EngineAbsentError,
    EngineConflictError,
    EngineError,
    EngineRefusedError,
    EngineUnreachableError,
)
from driver_docker.errors import SandboxNotFoundError
from driver_docker.records import RecordPhase
from driver_docker.services import now
from driver_docker.teardown import remove_container
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
        """Stop a sandbox that has a workload container. The caller holds the sandbox's lock.

        Raises:
            SandboxNotFoundError: Its workload container is gone.
            EngineUnreachableError: The engine could not be asked at all, and nothing was done; or it went away in the
                middle, and the stop is completed when it answers again.
            EngineError: The engine refuses; the sandbox is as it was, as far as the engine let it.
        """
        services = self._services
        before = sandbox.record
        try:
            sandbox.workload = await self._engine.inspect_container(before.workload_id)
        except EngineAbsentError:
            self._exits.ended(sandbox, Component.WORKLOAD)
            raise _gone(sandbox) from None
        except EngineUnreachableError:
            if before.phase in {RecordPhase.PROVISIONING, RecordPhase.STARTING}:
                # Its launch was given up for this stop, which is completed instead.
                sandbox.record = before.changed(now(), phase=RecordPhase.STOPPING)
                await services.save_quietly(sandbox)
            raise
        if sandbox.workload.status is ContainerStatus.REMOVING:
            raise _gone(sandbox)
        if before.phase is RecordPhase.STOPPED and not sandbox.workload.status.is_alive:
            services.publish_snapshot(sandbox)
            return
        sandbox.intentional |= sandbox.container_ids
        sandbox.record = before.changed(now(), phase=RecordPhase.STOPPING, failure=None)
        sandbox.notify()
        try:
            await services.save(sandbox)
            services.publish_snapshot(sandbox)
            await self.complete(sandbox)
        except EngineUnreachableError:
            raise
        except BaseException as error:
            if sandbox.record.phase is RecordPhase.STOPPING:
                # The workload may run on, so its end is news again. The supervisor's is not: this may have caused it.
                sandbox.intentional.discard(before.workload_id)
                phase = RecordPhase.STOPPED if before.phase is RecordPhase.STOPPED else RecordPhase.ACTIVE
                sandbox.record = sandbox.record.changed(now(), phase=phase, failure=before.failure)
                await services.save_quietly(sandbox)
                services.publish_snapshot(sandbox)
            if isinstance(error, EngineAbsentError):
                self._exits.ended(sandbox, Component.WORKLOAD)
                raise _gone(sandbox) from None
            raise

    async def complete(self, sandbox: Sandbox) -> None:
        """Carry a recorded stop to its end. The caller holds the sandbox's lock.

        Raises:
            EngineAbsentError: The workload container is gone.
            EngineError: The engine cannot be asked, or refuses.
        """
        services = self._services
        sandbox.intentional |= sandbox.container_ids
        await self.stop_containers(sandbox)
        sandbox.run += 1
        sandbox.record = sandbox.record.changed(
            now(), phase=RecordPhase.STOPPED, failure=None, was_ready=False, supervisor_id=""
        )
        await services.save(sandbox)
        services.publish_snapshot(sandbox)
        services.log_of(sandbox).info("sandbox stopped")

    async def stop_containers(self, sandbox: Sandbox) -> None:
        """Remove the supervisor and stop the workload, whatever state they are in.

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
            await remove_container(self._engine, record.supervisor_id)
        try:
            await self._engine.stop_container(record.workload_id, grace_seconds=config.stop_grace_seconds)
        except (EngineConflictError, EngineRefusedError):
            if (await self._engine.inspect_container(record.workload_id)).status.is_alive:
                # Older engines cannot stop a paused container.
                with contextlib.suppress(EngineConflictError, EngineRefusedError):
                    await self._engine.unpause_container(record.workload_id)
                await self._engine.stop_container(record.workload_id, grace_seconds=config.stop_grace_seconds)
        sandbox.workload = await self._engine.inspect_container(record.workload_id)

    async def resume(self, sandbox: Sandbox) -> None:
        """Go on with a stop that was interrupted; what the engine refuses is tried again at the next look."""
        async with sandbox.lock:
            if sandbox.record.phase is not RecordPhase.STOPPING:
                return
            try:
                await self.complete(sandbox)
            except EngineAbsentError:
                sandbox.intentional.discard(sandbox.record.workload_id)
                sandbox.record = sandbox.record.changed(now(), phase=RecordPhase.ACTIVE)
                self._exits.ended(sandbox, Component.WORKLOAD)
            except EngineError as error:
                self._services.log_of(sandbox).warning("stop not complete yet", error=error.message)


def _gone(sandbox: Sandbox) -> SandboxNotFoundError:
    return SandboxNotFoundError(f"the workload container of sandbox {sandbox.sandbox_id} no longer exists")
