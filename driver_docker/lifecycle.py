"""The verbs on a sandbox: create, start, stop, delete, and the reading ones.

A verb that changes something runs as a task of its own: when its caller goes away it is carried on to its end
(compute-driver contract 3.5, 3.6, 3.8). What keeps verbs and launches from acting beside each other is said in `turns`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from driver_docker import events
from driver_docker.concurrency import together
from driver_docker.engine import EngineAbsentError, EngineError, EngineTimeoutError, EngineUnreachableError
from driver_docker.errors import (
    DriverError,
    InvalidRequestError,
    PreconditionError,
    RecordError,
    SandboxNotFoundError,
    UnreadableRecordError,
)
from driver_docker.labels import owner_labels
from driver_docker.provision import Provisioner
from driver_docker.records import RECORD_FILE
from driver_docker.sandbox_record import RecordPhase
from driver_docker.services import now
from driver_docker.start import Starter
from driver_docker.stop import Stopper
from driver_docker.teardown import remove_sandbox
from driver_docker.turns import LAUNCHING, end_launch
from openshell.verdicts import Component

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from driver_docker.concurrency import Background
    from driver_docker.engine_objects import ContainerStatus
    from driver_docker.events import Snapshot
    from driver_docker.exits import Exits
    from driver_docker.launch import Launcher
    from driver_docker.requests import LaunchRequest
    from driver_docker.sandboxes import Sandbox
    from driver_docker.services import Services
    from openshell.isolation.documents import LaunchAuthentication

_LOOK_SECONDS: Final = 5.0
"""How long a look may take; a gateway waits ten seconds for it (compute-driver contract 3.14)."""
_KNOWN_SECONDS: Final = 5.0
"""How long a look at everything counts for each sandbox of which nothing was heard since."""
_ASKED_ABOUT: Final = frozenset({RecordPhase.STARTING, RecordPhase.STOPPING, RecordPhase.STOPPED})
"""Phases whose state is the driver's own decision; an engine that cannot be asked makes it unavailable all the same."""


class Lifecycle:
    """Carries out the gateway's verbs."""

    def __init__(self, services: Services, launcher: Launcher, exits: Exits, background: Background) -> None:
        self._services = services
        self._engine = services.engine
        self._launcher = launcher
        self._exits = exits
        self._background = background
        self._provisioner = Provisioner(services, launcher, exits, background)
        self._stopper = Stopper(services, exits)
        self._starter = Starter(services, launcher, exits, self._stopper, background)

    async def validate(self, request: LaunchRequest) -> None:
        """Refuse what a create would refuse, without side effects (compute-driver contract 3.4).

        Raises:
            PreconditionError: The image may not be pulled and is not here.
            IncompatibleError: Gateway, supervisor and runtime are of revisions that do not fit together.
            EngineUnreachableError: The engine does not answer.
        """
        await together(self._engine.ping(), self._services.gate.admit_new())
        await self._launcher.images.check(request.image)
        await self._launcher.resources.check(request)

    async def create(self, request: LaunchRequest) -> None:
        """Reserve a sandbox and launch it in the background.

        Raises:
            PreconditionError: No launch credentials, or what `validate` refuses.
            SandboxExistsError: The id is taken.
            RecordError: The reservation could not be recorded; nothing is left.
        """
        launch = request.launch
        if launch is None:
            raise PreconditionError(
                "launch_authentication is empty: this driver launches only with credentials; "
                "configure the gateway's gateway_jwt"
            )
        await self.validate(request)
        await self._background.to_the_end(
            self._provisioner.create(request, launch), name=f"create {request.sandbox_id}"
        )

    async def start(self, *, sandbox_id: str, name: str, generation: str, launch: LaunchAuthentication | None) -> None:
        """Start a sandbox again. Idempotent (compute-driver contract 3.7); it becomes ready in the background.

        Args:
            sandbox_id: The sandbox.
            name: Its name, where no id is given.
            generation: The gateway's name of this start.
            launch: New credentials, or none.

        Raises:
            InvalidRequestError: The generation is not one.
            SandboxNotFoundError: There is no such sandbox, or nothing of it is left to start.
            PreconditionError: It cannot be started so; the text says what would help.
            EngineUnreachableError: The engine cannot be asked.
        """
        sandbox = self._services.table.find(sandbox_id=sandbox_id, name=name)
        self._starter.check_generation(generation)
        await self._background.to_the_end(
            self._starter.start(sandbox, generation, launch), name=f"start {sandbox.sandbox_id}"
        )

    async def stop(self, *, sandbox_id: str, name: str) -> None:
        """Stop a sandbox and keep what a start needs. Idempotent (compute-driver contract 3.6).

        Raises:
            SandboxNotFoundError: There is none.
            EngineError: The engine failed; the sandbox is as it was, or its stop is completed later.
        """
        sandbox = self._services.table.find(sandbox_id=sandbox_id, name=name)
        await self._background.to_the_end(self._stop(sandbox), name=f"stop {sandbox.sandbox_id}")

    async def _stop(self, sandbox: Sandbox) -> None:
        services = self._services
        async with sandbox.lock:
            self._check_present(sandbox)
            if sandbox.record.phase in LAUNCHING:
                await self._engine.ping()  # what is under way is not given up for a stop that cannot be made
            await end_launch(sandbox)
            phase = sandbox.record.phase
            if phase is RecordPhase.DELETING:
                raise SandboxNotFoundError(f"sandbox {sandbox.sandbox_id} is being deleted")
            if phase is RecordPhase.FAILED:
                if not sandbox.cleared:
                    await self._provisioner.clear(sandbox)  # the launch may have been ended before it did so
                services.publish_snapshot(sandbox)
            elif not sandbox.record.workload_id:
                # There is nothing yet that a start could use. What cannot be removed now is removed later.
                self._mark_deleting(sandbox)
                await self._remove(sandbox)
            else:
                await self._stopper.stop(sandbox)

    async def delete(self, *, sandbox_id: str, name: str) -> bool:
        """Remove a sandbox and everything of it. Idempotent (compute-driver contract 3.8).

        Returns:
            Whether anything was removed by this call.

        Raises:
            InvalidRequestError: Neither id nor name.
            UnreadableRecordError: Only a name is given, and it may be that of a sandbox whose record cannot be read.
            EngineError: Something is still there; the sandbox stays in deletion and the call may be repeated.
        """
        try:
            sandbox = self._services.table.find(sandbox_id=sandbox_id, name=name)
        except (SandboxNotFoundError, UnreadableRecordError) as error:
            if not sandbox_id:
                if isinstance(error, UnreadableRecordError):
                    raise  # it may be the one that is meant
                return False
            return await self._background.to_the_end(self._delete_leftovers(sandbox_id), name=f"delete {sandbox_id}")
        return await self._background.to_the_end(self._delete(sandbox), name=f"delete {sandbox.sandbox_id}")

    async def _delete(self, sandbox: Sandbox) -> bool:
        async with sandbox.lock:
            if not self._services.table.holds(sandbox):
                return False  # another delete was faster
            self._mark_deleting(sandbox)
            await end_launch(sandbox)
            await self._remove(sandbox)
        return True

    def _mark_deleting(self, sandbox: Sandbox) -> None:
        """From here on nothing that ends is news, and no launch comes through or fails."""
        if sandbox.record.phase is RecordPhase.DELETING:
            return
        sandbox.record = sandbox.record.changed(now(), phase=RecordPhase.DELETING)
        sandbox.intentional |= sandbox.container_ids
        sandbox.notify()
        self._services.publish_snapshot(sandbox)

    async def _remove(self, sandbox: Sandbox) -> None:
        services = self._services
        await self._record_deletion(sandbox)
        await remove_sandbox(self._engine, services.owner, sandbox.sandbox_id, sandbox.container_ids)
        await services.remove_record(sandbox.sandbox_id)
        services.publish(events.Deleted(sandbox_id=sandbox.sandbox_id))
        services.log_of(sandbox).info("sandbox deleted")

    async def _record_deletion(self, sandbox: Sandbox) -> None:
        """Leave no record by which the next driver would take the deletion for somebody else's.

        Raises:
            RecordError: The disk refuses both; nothing was removed.
        """
        try:
            await self._services.save(sandbox)
        except RecordError:
            # A disk that is full still removes, and a folder without a record is a leftover.
            if not await self._services.remove_files(sandbox, (RECORD_FILE,)):
                raise

    async def _delete_leftovers(self, sandbox_id: str) -> bool:
        services = self._services
        async with services.table.lock_of(sandbox_id):
            sandbox = services.table.by_id(sandbox_id)
            if sandbox is None:
                found = await remove_sandbox(self._engine, services.owner, sandbox_id)
                found |= await services.remove_record(sandbox_id)
                if found:
                    services.publish(events.Deleted(sandbox_id=sandbox_id))
                return found
        return await self._delete(sandbox)  # created while this call waited: in a turn of its own

    async def get(self, *, sandbox_id: str, name: str) -> Snapshot:
        """The state of one sandbox, looked at now.

        Raises:
            SandboxNotFoundError: Certainly absent.
            EngineUnreachableError: The engine cannot be asked; says nothing about the sandbox.
        """
        if not sandbox_id and not name:
            raise InvalidRequestError("sandbox_id and name are both empty; give the id")
        sandbox = self._services.table.find(sandbox_id=sandbox_id, name=name)
        if sandbox.record.phase is RecordPhase.ACTIVE:
            if not self._is_known(sandbox):
                await self._in_time(self.refresh(sandbox), f"how sandbox {sandbox.sandbox_id} is")
        elif sandbox.record.phase in _ASKED_ABOUT:
            await self._engine.ping()
        return self._services.snapshot(sandbox)

    def _is_known(self, sandbox: Sandbox) -> bool:
        """Whether there is nothing to be asked: a list was looked at just now, and the engine tells what changes.

        A gateway lists every minute and then asks for each sandbox by itself (compute-driver contract 3.10).
        """
        since = asyncio.get_running_loop().time() - _KNOWN_SECONDS
        services = self._services
        return services.events_are_read and sandbox.is_known(since=since, stream=services.event_stream)

    async def list(self) -> tuple[Snapshot, ...]:
        """The state of all sandboxes; fails rather than shrinks when the engine cannot be asked.

        Raises:
            EngineUnreachableError: The engine cannot be asked.
        """
        await self._in_time(self._look(), "how the sandboxes are")
        return tuple(self._services.snapshot(sandbox) for sandbox in self._services.table)

    async def _look(self) -> None:
        """Note which sandboxes are as they are known to be; the others are looked at one by one when asked about."""
        at, stream = asyncio.get_running_loop().time(), self._services.event_stream
        heard = {sandbox: sandbox.heard for sandbox in self._services.table}
        found = await self._engine.list_containers(owner_labels(self._services.owner))
        rows = {row.container_id: row for row in found}
        for sandbox, before in heard.items():
            sandbox.agree(rows, at=at, stream=stream, heard=before)

    async def _in_time(self, look: Coroutine[Any, Any, object], what: str) -> None:
        """Look, for as long as a gateway waits for the answer.

        Raises:
            EngineUnreachableError: The engine does not say, whatever it answers instead: that is no news about a
                sandbox, and asking again may help.
            EngineTimeoutError: It takes too long.
        """
        try:
            async with asyncio.timeout(_LOOK_SECONDS):
                await look
        except TimeoutError:
            raise EngineTimeoutError(f"the engine did not say in time {what}") from None
        except EngineUnreachableError:
            raise
        except EngineError as error:
            raise EngineUnreachableError(f"the engine does not say {what}: {error.message}") from error

    async def refresh(self, sandbox: Sandbox) -> ContainerStatus | None:
        """Look at the workload again; an end that no event told is handled like one that was told.

        Raises:
            EngineUnreachableError: The engine cannot be asked.
        """
        run = sandbox.run
        try:
            facts = await self._engine.inspect_container(sandbox.record.workload_id)
        except EngineAbsentError:
            self._ended(sandbox)
            return None
        if sandbox.run != run or sandbox.record.phase is not RecordPhase.ACTIVE:
            return facts.status  # an answer about an earlier run
        sandbox.workload = facts
        if not facts.status.is_alive:
            self._ended(sandbox)
        return facts.status

    def _ended(self, sandbox: Sandbox) -> None:
        """Handle an end that no event told, unless it follows from a failure that was told, if by an earlier driver."""
        if sandbox.record.failure is None:
            self._exits.ended(sandbox, Component.WORKLOAD)

    def resume(self, sandbox: Sandbox) -> None:
        """Go on with what an outage or the end of an earlier driver has interrupted. Returns at once.

        A sandbox that is stopped is stopped again, where somebody has started its workload.
        """
        if sandbox.lock.locked():
            return  # somebody is at it
        phase, name = sandbox.record.phase, f"resume {sandbox.sandbox_id}"
        if phase is RecordPhase.STARTING:
            self._starter.resume(sandbox)
        elif phase is RecordPhase.STOPPING:
            self._background.spawn(self._stopper.resume(sandbox), name=name)
        elif phase is RecordPhase.STOPPED:
            self._background.spawn(self._stopper.stop_again(sandbox), name=name)
        elif phase is RecordPhase.DELETING:
            self._background.spawn(self._resume_delete(sandbox), name=name)
        elif phase is RecordPhase.FAILED:
            self._background.spawn(self._provisioner.clear_failed(sandbox), name=name)
        elif phase is RecordPhase.ACTIVE and sandbox.record.failure is not None:
            self._background.spawn(self._exits.finish(sandbox), name=name)

    async def _resume_delete(self, sandbox: Sandbox) -> None:
        try:
            await self._delete(sandbox)
        except (EngineError, RecordError) as error:
            self._services.log_of(sandbox).warning("deletion not complete yet", error=error.message)

    async def abandon_launches(self) -> None:
        """Cancel every pending launch and remove what it made: the driver is ending.

        A start is cancelled too; the next driver goes on with it.
        """
        await asyncio.gather(*(self._abandon(sandbox) for sandbox in self._services.table if _is_pending(sandbox)))

    async def _abandon(self, sandbox: Sandbox) -> None:
        async with sandbox.lock:
            if not self._services.table.holds(sandbox):
                return
            await end_launch(sandbox)
            if sandbox.record.phase is RecordPhase.PROVISIONING:
                await self._provisioner.conclude_failed(sandbox, interrupted())
            if sandbox.record.phase is RecordPhase.FAILED and not sandbox.cleared:
                await self._provisioner.clear(sandbox)

    def _check_present(self, sandbox: Sandbox) -> None:
        if not self._services.table.holds(sandbox):
            raise SandboxNotFoundError(f"sandbox {sandbox.sandbox_id} was deleted meanwhile")


def _is_pending(sandbox: Sandbox) -> bool:
    """Whether a launch is under way, or has failed with something of it left."""
    phase = sandbox.record.phase
    return phase in LAUNCHING or (phase is RecordPhase.FAILED and not sandbox.cleared)


def interrupted() -> DriverError:
    """What a launch is told to have failed with when the driver ended in the middle of it."""
    return DriverError("the driver ended while the sandbox was being provisioned; delete it and create it again")
