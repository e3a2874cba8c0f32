"""The verbs on a sandbox: create, stop, delete, and the reading ones.

A verb that changes something runs as a task of its own: when its caller goes away it is carried on to its end
(compute-driver contract 3.5, 3.6, 3.8). One lock for each sandbox keeps verbs from interleaving; a pending launch is
cancelled first and awaited, so that its failure path cannot touch what the verb does.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from driver_docker import events, names
from driver_docker.concurrency import together
from driver_docker.engine import EngineAbsentError, EngineConflictError, EngineError, EngineRefusedError
from driver_docker.errors import (
    DriverError,
    InvalidRequestError,
    NotBuiltError,
    PreconditionError,
    SandboxNotFoundError,
)
from driver_docker.exits import failure_of
from driver_docker.launch import ExitBeforeReadyError, as_failure
from driver_docker.records import Failure, RecordPhase, SandboxRecord
from driver_docker.services import now
from driver_docker.teardown import remove_container, remove_sandbox
from openshell.verdicts import Component

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from driver_docker.concurrency import Background
    from driver_docker.engine import ContainerStatus
    from driver_docker.events import Snapshot
    from driver_docker.exits import Exits
    from driver_docker.launch import Launcher
    from driver_docker.requests import LaunchRequest
    from driver_docker.sandboxes import Sandbox
    from driver_docker.services import Services
    from openshell.isolation.documents import LaunchAuthentication

Result = TypeVar("Result")


class Lifecycle:
    """Carries out the gateway's verbs."""

    def __init__(self, services: Services, launcher: Launcher, exits: Exits, background: Background) -> None:
        self._services = services
        self._engine = services.engine
        self._launcher = launcher
        self._exits = exits
        self._background = background

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
        await self._to_the_end(self._create(request, launch), f"create {request.sandbox_id}")

    async def _create(self, request: LaunchRequest, launch: LaunchAuthentication) -> None:
        services = self._services
        sandbox = services.table.add(
            SandboxRecord(
                sandbox_id=request.sandbox_id,
                name=request.name,
                workspace=request.workspace,
                phase=RecordPhase.PROVISIONING,
                changed_at=now(),
                generation=launch.supervisor.runtime_generation,
                image_reference=request.image,
                isolation_backend=services.config.backend_name,
                container_name=names.workload_container_name(
                    workspace=request.workspace, name=request.name, sandbox_id=request.sandbox_id
                ),
            )
        )
        sandbox.secrets = (launch.supervisor.gateway_token, launch.supervisor.sandbox_token)
        try:
            await services.save(sandbox)
        except BaseException:
            services.table.discard(sandbox)
            raise
        services.publish(events.scheduled(sandbox.sandbox_id, now(), image=request.image))
        services.publish_snapshot(sandbox)
        sandbox.launch_task = self._background.spawn(
            self._launch(sandbox, request, launch), name=f"launch {sandbox.sandbox_id}"
        )

    async def _launch(self, sandbox: Sandbox, request: LaunchRequest, launch: LaunchAuthentication) -> None:
        services = self._services
        try:
            await self._launcher.launch(sandbox, request, launch)
            sandbox.workload = await self._engine.inspect_container(sandbox.record.workload_id)
        except Exception as error:
            if not isinstance(error, DriverError):
                services.log_of(sandbox).exception("launch failed unexpectedly")
            await self._launch_failed(sandbox, error)
            return
        sandbox.record = sandbox.record.changed(now(), phase=RecordPhase.ACTIVE, was_ready=True)
        services.publish(events.started(sandbox.sandbox_id, now(), container_name=sandbox.record.container_name))
        services.publish_snapshot(sandbox)
        self._exits.look(sandbox)
        await services.save_quietly(sandbox)

    async def _launch_failed(self, sandbox: Sandbox, error: Exception) -> None:
        """Tell why, then remove everything that was made; the failed record stays until it is deleted."""
        services = self._services
        if sandbox.record.phase is not RecordPhase.PROVISIONING:
            return  # a delete has taken over
        reason, message = as_failure(error)
        failure = Failure(reason=reason, message=message, at=now())
        if isinstance(error, ExitBeforeReadyError):
            failure = failure_of(error.exit.verdict)
        sandbox.intentional |= sandbox.container_ids
        sandbox.record = sandbox.record.changed(now(), phase=RecordPhase.FAILED, failure=failure)
        sandbox.workload = None
        services.log_of(sandbox).warning("launch failed", reason=failure.reason, message=failure.message)
        # Written before it is told: its containers, which are the evidence, are about to be removed.
        if isinstance(error, ExitBeforeReadyError):
            await services.record_exit(sandbox, error.exit.verdict, error.exit.tail)
        else:
            await services.save_quietly(sandbox)
        # The verdict first: who stops watching at the terminal snapshot has it.
        services.publish(
            events.warning(
                sandbox.sandbox_id, failure.at, reason=failure.reason, message=failure.message, metadata=failure.verdict
            )
        )
        services.publish_snapshot(sandbox)
        await self.clear_failed(sandbox)

    async def clear_failed(self, sandbox: Sandbox) -> None:
        """Remove what a failed launch left in the engine; tried again at each resync while it fails."""
        async with sandbox.lock:
            if sandbox.record.phase is not RecordPhase.FAILED:
                return
            try:
                await remove_sandbox(self._engine, self._services.owner, sandbox.sandbox_id)
            except EngineError as error:
                self._services.log_of(sandbox).error("failed launch not removed yet", error=error.message)
            else:
                sandbox.record = replace(sandbox.record, workload_id="", supervisor_id="")
                await self._services.save_quietly(sandbox)

    async def start(self, *, sandbox_id: str, name: str) -> None:
        """Start a stopped sandbox again: not offered yet.

        Raises:
            SandboxNotFoundError: There is none.
            NotBuiltError: Always, otherwise.
        """
        sandbox = self._services.table.find(sandbox_id=sandbox_id, name=name)
        raise NotBuiltError(f"sandbox {sandbox.sandbox_id} cannot be started again by this version of the driver")

    async def stop(self, *, sandbox_id: str, name: str) -> None:
        """Stop a sandbox and keep what a start needs. Idempotent (compute-driver contract 3.6).

        Raises:
            SandboxNotFoundError: There is none.
            EngineError: The engine failed; the sandbox is as it was, as far as the engine let it.
        """
        sandbox = self._services.table.find(sandbox_id=sandbox_id, name=name)
        await self._to_the_end(self._stop(sandbox), f"stop {sandbox.sandbox_id}")

    async def _stop(self, sandbox: Sandbox) -> None:
        services = self._services
        await self._cancel_launch(sandbox)
        async with sandbox.lock:
            self._check_present(sandbox)
            record = sandbox.record
            if record.phase is RecordPhase.DELETING:
                raise SandboxNotFoundError(f"sandbox {sandbox.sandbox_id} is being deleted")
            if record.phase in {RecordPhase.FAILED, RecordPhase.STOPPED}:
                services.publish_snapshot(sandbox)
                return
            sandbox.intentional |= sandbox.container_ids
            sandbox.notify()
            if not record.workload_id:
                await self._remove(sandbox)
                return
            try:
                await self._stop_containers(sandbox)
            except EngineAbsentError:
                raise SandboxNotFoundError(
                    f"the workload container of sandbox {sandbox.sandbox_id} no longer exists"
                ) from None
            except EngineError:
                # The workload runs on, so its end is news again. The supervisor's is not: this stop may have caused it.
                sandbox.intentional.discard(record.workload_id)
                raise
            sandbox.record = sandbox.record.changed(
                now(), phase=RecordPhase.STOPPED, failure=None, was_ready=False, supervisor_id=""
            )
            await services.save(sandbox)
            services.publish_snapshot(sandbox)

    async def _stop_containers(self, sandbox: Sandbox) -> None:
        record, config = sandbox.record, self._services.config
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
            # Older engines cannot stop a paused container.
            await self._engine.unpause_container(record.workload_id)
            await self._engine.stop_container(record.workload_id, grace_seconds=config.stop_grace_seconds)
        sandbox.workload = await self._engine.inspect_container(record.workload_id)

    async def delete(self, *, sandbox_id: str, name: str) -> bool:
        """Remove a sandbox and everything of it. Idempotent (compute-driver contract 3.8).

        Returns:
            Whether anything was removed by this call.

        Raises:
            InvalidRequestError: Neither id nor name.
            EngineError: Something is still there; the sandbox stays in deletion and the call may be repeated.
        """
        try:
            sandbox = self._services.table.find(sandbox_id=sandbox_id, name=name)
        except SandboxNotFoundError:
            if not sandbox_id:
                return False
            return await self._to_the_end(self._delete_leftovers(sandbox_id), f"delete {sandbox_id}")
        return await self._to_the_end(self._delete(sandbox), f"delete {sandbox.sandbox_id}")

    async def _delete(self, sandbox: Sandbox) -> bool:
        services = self._services
        self._mark_deleting(sandbox)
        await self._cancel_launch(sandbox)
        async with sandbox.lock:
            if services.table.by_id(sandbox.sandbox_id) is not sandbox:
                return False  # another delete was faster
            self._mark_deleting(sandbox)  # again: a stop that was under way has set its own phase meanwhile
            await services.save_quietly(sandbox)
            await self._remove(sandbox)
        return True

    def _mark_deleting(self, sandbox: Sandbox) -> None:
        if sandbox.record.phase is RecordPhase.DELETING:
            return
        sandbox.record = sandbox.record.changed(now(), phase=RecordPhase.DELETING)
        sandbox.intentional |= sandbox.container_ids
        sandbox.notify()
        self._services.publish_snapshot(sandbox)

    async def _remove(self, sandbox: Sandbox) -> None:
        services = self._services
        await remove_sandbox(self._engine, services.owner, sandbox.sandbox_id)
        await services.remove_record(sandbox.sandbox_id)
        services.table.discard(sandbox)
        services.publish(events.Deleted(sandbox_id=sandbox.sandbox_id))
        services.log_of(sandbox).info("sandbox deleted")

    async def _delete_leftovers(self, sandbox_id: str) -> bool:
        found = await remove_sandbox(self._engine, self._services.owner, sandbox_id)
        found |= await self._services.remove_record(sandbox_id)
        if found:
            self._services.publish(events.Deleted(sandbox_id=sandbox_id))
        return found

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
            await self.refresh(sandbox)
        elif sandbox.record.phase is RecordPhase.STOPPED:
            await self._engine.ping()
        return self._services.snapshot(sandbox)

    async def list(self) -> tuple[Snapshot, ...]:
        """The state of all sandboxes; fails rather than shrinks when the engine cannot be asked.

        Raises:
            EngineUnreachableError: The engine cannot be asked.
        """
        await self._engine.ping()
        return tuple(self._services.snapshot(sandbox) for sandbox in self._services.table)

    async def refresh(self, sandbox: Sandbox) -> ContainerStatus | None:
        """Look at the workload again; an end that no event told is handled like one that was told.

        Raises:
            EngineUnreachableError: The engine cannot be asked.
        """
        workload = sandbox.record.workload_id
        try:
            facts = await self._engine.inspect_container(workload)
        except EngineAbsentError:
            self._exits.ended(sandbox, Component.WORKLOAD)
            return None
        if sandbox.record.workload_id != workload:
            return facts.status
        sandbox.workload = facts
        if facts.finished_at is not None and not facts.running:
            self._exits.ended(sandbox, Component.WORKLOAD)
        return facts.status

    async def abandon_launches(self) -> None:
        """Cancel every pending launch and remove what it made: the driver is ending."""
        pending = [sandbox for sandbox in self._services.table if sandbox.record.phase is RecordPhase.PROVISIONING]
        await asyncio.gather(*(self._abandon(sandbox) for sandbox in pending))

    async def _abandon(self, sandbox: Sandbox) -> None:
        await self._cancel_launch(sandbox)
        if sandbox.record.phase is RecordPhase.PROVISIONING:
            await self._launch_failed(sandbox, interrupted())

    async def _cancel_launch(self, sandbox: Sandbox) -> None:
        task = sandbox.launch_task
        if task is None or task.done():
            return
        task.cancel()
        await asyncio.wait([task])

    def _check_present(self, sandbox: Sandbox) -> None:
        if self._services.table.by_id(sandbox.sandbox_id) is not sandbox:
            raise SandboxNotFoundError(f"sandbox {sandbox.sandbox_id} was deleted meanwhile")

    async def _to_the_end(self, verb: Coroutine[Any, Any, Result], name: str) -> Result:
        """Run a verb as a task that outlives its caller."""
        outcome: asyncio.Future[Result] = asyncio.get_running_loop().create_future()

        async def carry_out() -> None:
            try:
                result = await verb
            except asyncio.CancelledError:
                outcome.cancel()
                raise
            except BaseException as error:
                if outcome.cancelled():
                    raise  # nobody waits: reported as a background error
                outcome.set_exception(error)
            else:
                if not outcome.cancelled():
                    outcome.set_result(result)

        self._background.spawn(carry_out(), name=name)
        return await outcome


def interrupted() -> DriverError:
    """What a launch is told to have failed with when the driver ended in the middle of it."""
    return DriverError("the driver ended while the sandbox was being provisioned; delete it and create it again")
