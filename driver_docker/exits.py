"""What happens when a container of a ready sandbox ends (compute-driver contract 5.10).

The news goes out as soon as the evidence is in: one event with the verdict, then one snapshot. Only then is it
recorded and is the rest of the sandbox taken down. A driver that is killed in between finds the same evidence when it
starts again.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from driver_docker.engine import EngineAbsentError, EngineError
from driver_docker.postmortem import Exit, examine
from driver_docker.sandbox_record import Failure, RecordPhase
from driver_docker.services import now
from driver_docker.teardown import remove_container, stop_workload
from driver_docker.verdict import LOST_CODE
from openshell.verdicts import Component

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from driver_docker.concurrency import Background
    from driver_docker.engine_objects import ContainerFacts
    from driver_docker.sandbox_record import SandboxRecord
    from driver_docker.sandboxes import Sandbox
    from driver_docker.services import Services
    from openshell.verdicts import Verdict

_ORDERLY_CODES: Final = frozenset({0, 143})
"""Codes that an orderly close can give: only for these is a late Stop or the workload's end waited for."""
_ORDERLY_GRACE_SECONDS: Final = 1.0
_SHUTDOWN_SPREAD: Final = timedelta(seconds=20)
"""How far apart an engine that ends may end the containers of one sandbox."""
_FOLLOW_GRACE_SECONDS: Final = 10.0
"""How long a supervisor may report the end of its workload before it is removed."""


class Exits:
    """Tells and tidies up after exits of ready sandboxes."""

    def __init__(self, services: Services, background: Background) -> None:
        self._services = services
        self._background = background

    def look(self, sandbox: Sandbox) -> None:
        """Handle every end that the events of a sandbox tell and that was not handled yet. Returns at once."""
        record = sandbox.record
        if record.phase is not RecordPhase.ACTIVE:
            return
        # The workload first: a supervisor that ended after it followed it.
        for component, container in (
            (Component.WORKLOAD, record.workload_id),
            (Component.SUPERVISOR, record.supervisor_id),
        ):
            if sandbox.has_event(container, "die", "destroy"):
                self.ended(sandbox, component)

    def ended(self, sandbox: Sandbox, component: Component) -> None:
        """Handle the end of one current container, once. Returns at once."""
        record = sandbox.record
        supervisor = component is Component.SUPERVISOR
        container = record.supervisor_id if supervisor else record.workload_id
        if not container or container in sandbox.judged or not self._is_news(sandbox, container):
            return
        sandbox.judged.add(container)
        sandbox.heard += 1
        handle = self._supervisor_ended if supervisor else self._workload_ended
        self._background.spawn(
            self._conclude(sandbox, handle(sandbox, container), {container}),
            name=f"{component.value} of {sandbox.sandbox_id} ended",
        )

    @staticmethod
    async def _conclude(sandbox: Sandbox, handling: Awaitable[bool], containers: set[str]) -> None:
        """Await the handling of an end; where nothing could be concluded, the next look takes it up again."""
        run, concluded = sandbox.run, False
        try:
            concluded = await handling
        finally:
            if not concluded and sandbox.run == run:
                sandbox.judged -= containers

    def both_ended(self, sandbox: Sandbox) -> None:
        """Handle the end of both containers that no event told, in the order in which they ended. Returns at once."""
        record = sandbox.record
        if record.supervisor_id in sandbox.judged and sandbox.workload_ended_first:
            # It followed, and the end that it followed is not told yet if the engine did not say enough of it.
            self.ended(sandbox, Component.WORKLOAD)
            return
        if any(container in sandbox.judged for container in sandbox.container_ids):
            return  # one of them is being handled, and the other follows from it
        sandbox.heard += 1
        self._background.spawn(self._both_ended(sandbox, record), name=f"ends of {sandbox.sandbox_id}")

    async def _both_ended(self, sandbox: Sandbox, record: SandboxRecord) -> None:
        run = sandbox.run
        try:
            both = await self._look_at_both(record)
        except EngineError as error:
            # The order decides whom to blame, and nothing is known of it: the next look asks again.
            self._services.log_of(sandbox).warning("ends could not be looked at", error=error.message)
            return
        if sandbox.run != run or sandbox.record.phase is not RecordPhase.ACTIVE:
            return
        if any(container in sandbox.judged for container in sandbox.container_ids):
            return  # an event was faster
        # An engine that ends stops all at once, each with a grace of its own; a workload that lost its supervisor ends
        # itself only after its recovery window. So a short lead of the supervisor's says nothing.
        workload, supervisor = (facts.finished_at if facts is not None else None for facts in both)
        first = workload is None or supervisor is None or supervisor + _SHUTDOWN_SPREAD >= workload
        sandbox.workload_ended_first = first = self._note_loss(sandbox, both) or first
        if first:
            self.ended(sandbox, Component.WORKLOAD)
            self.ended(sandbox, Component.SUPERVISOR)
        elif self._is_news(sandbox, record.supervisor_id):
            # Its end follows from the supervisor's, once that is told.
            ids = {record.workload_id, record.supervisor_id}
            sandbox.judged |= ids
            await self._conclude(sandbox, self._supervisor_ended(sandbox, record.supervisor_id), ids)

    async def _look_at_both(self, record: SandboxRecord) -> list[ContainerFacts | None]:
        """Workload and supervisor; `None` for one that is gone, of which nobody can say any more.

        Raises:
            EngineError: The engine did not say.
        """
        return [await self._look_at(each) for each in (record.workload_id, record.supervisor_id)]

    async def _look_at(self, container: str) -> ContainerFacts | None:
        if not container:
            return None
        try:
            return await self._services.engine.inspect_container(container)
        except EngineAbsentError:
            return None

    @staticmethod
    def _note_loss(sandbox: Sandbox, both: list[ContainerFacts | None]) -> bool:
        """Whether the engine has lost both containers, as it has when its machine was reset. Decided here alone.

        However that is seen first, the workload counts as the one that ended first.
        """
        if not all(each is not None and not each.status.is_alive and each.exit_code == LOST_CODE for each in both):
            return False
        sandbox.lost = sandbox.workload_ended_first = True
        return True

    def _is_news(self, sandbox: Sandbox, container: str) -> bool:
        return (
            sandbox.record.phase is RecordPhase.ACTIVE
            and container in sandbox.container_ids
            and container not in sandbox.intentional
        )

    async def _supervisor_ended(self, sandbox: Sandbox, container: str) -> bool:
        """Handle the end of a supervisor; whether that could be concluded."""
        run = sandbox.run
        ended = await self._examine(sandbox, Component.SUPERVISOR)
        if ended is not None and ended.verdict.exit_code in _ORDERLY_CODES and ended.verdict.is_failure:
            await self._settle(sandbox, container)
            if self._is_news(sandbox, container):
                ended = await self._examine(sandbox, Component.SUPERVISOR)
        if sandbox.run != run:
            return True  # the answer is about an earlier run
        if ended is None or not self._is_news(sandbox, container) or not ended.verdict.is_exit:
            return False
        if ended.verdict.is_failure:
            self._tell(sandbox, ended)
        await self._services.record_exit(sandbox, ended.verdict, ended.tail)
        await self._take_down(sandbox, container, workload_too=ended.verdict.is_failure)
        return True

    async def _workload_ended(self, sandbox: Sandbox, container: str) -> bool:
        """Handle the end of a workload; whether that could be concluded."""
        run = sandbox.run
        ended = await self._examine(sandbox, Component.WORKLOAD)
        if sandbox.run != run:
            return True
        # No news while it is being stopped; if the engine refuses the stop, it is news again.
        if ended is None or not self._is_news(sandbox, container):
            return False
        if not ended.verdict.is_exit or self._is_old(sandbox, ended):
            return False
        sandbox.workload = ended.facts or sandbox.workload
        if sandbox.record.failure is None:
            self._tell(sandbox, ended)
        await self._services.record_exit(sandbox, ended.verdict, ended.tail)
        if ended.facts is not None and ended.facts.status.is_alive:
            # Somebody gave it a restart policy. What was told as ended must not run on without its supervisor.
            await self._end_restarts(sandbox, container)
        supervisor = sandbox.record.supervisor_id
        await self._wait(sandbox, lambda: sandbox.has_event(supervisor, "die", "destroy"), _FOLLOW_GRACE_SECONDS)
        if supervisor not in sandbox.judged and self._is_news(sandbox, supervisor):
            await self._take_down(sandbox, supervisor, workload_too=False)
        return True

    @staticmethod
    def _is_old(sandbox: Sandbox, ended: Exit) -> bool:
        """Whether the end is that of the run before the last start (compute-driver contract 5.9)."""
        fence = sandbox.record.fenced_finished_at
        return fence is not None and ended.facts is not None and ended.facts.finished_at == fence

    async def _examine(self, sandbox: Sandbox, component: Component) -> Exit | None:
        """Say why a container ended; `None` where the engine does not say enough to conclude anything."""
        services, record, run = self._services, sandbox.record, sandbox.run
        follows = component is Component.SUPERVISOR and (
            sandbox.workload_ended_first or sandbox.has_event(record.workload_id, "die", "destroy")
        )
        ended = await examine(services, sandbox, component, workload_ended_first=follows)
        if ended.verdict.exit_code != LOST_CODE or sandbox.lost or sandbox.run != run:
            return ended
        try:
            both = await self._look_at_both(record)
        except EngineError as error:
            services.log_of(sandbox).warning("ends could not be looked at", error=error.message)
            return None
        if sandbox.run != run or not self._note_loss(sandbox, both):
            return ended
        self.ended(sandbox, Component.WORKLOAD)
        follows = component is Component.SUPERVISOR
        return await examine(services, sandbox, component, workload_ended_first=follows)

    async def _settle(self, sandbox: Sandbox, container: str) -> None:
        """Wait for what would make an orderly exit an expected one: a Stop, or the workload's end."""
        workload = sandbox.record.workload_id
        await self._wait(
            sandbox,
            lambda: sandbox.has_event(workload, "die", "destroy") or not self._is_news(sandbox, container),
            _ORDERLY_GRACE_SECONDS,
        )

    def _tell(self, sandbox: Sandbox, ended: Exit) -> None:
        verdict = ended.verdict
        failure = failure_of(verdict)
        sandbox.record = sandbox.record.changed(failure.at, failure=failure)
        self._services.tell_failure(sandbox)
        self._services.log_of(sandbox).warning(
            "container ended", component=verdict.component.value, kind=verdict.kind.value, message=verdict.message
        )

    async def _take_down(self, sandbox: Sandbox, supervisor: str, *, workload_too: bool) -> None:
        """Stop the workload of a lost supervisor, and then remove the supervisor (compute-driver contract 5.10).

        Where the workload runs on, the supervisor stays, and `finish` does both later.
        """
        async with sandbox.lock:
            if not self._is_news(sandbox, supervisor):
                return
            workload = sandbox.record.workload_id
            if workload_too and not sandbox.has_event(workload, "die", "destroy"):
                sandbox.intentional.add(workload)
                if not await self._stop_workload(sandbox, workload):
                    return
            sandbox.intentional.add(supervisor)
            try:
                await remove_container(self._services.engine, supervisor)
            except EngineError as error:
                self._services.log_of(sandbox).error("supervisor not removed", error=error.message)

    async def finish(self, sandbox: Sandbox) -> None:
        """End what still runs of a sandbox whose failure was told; what the engine refuses is tried again later."""
        async with sandbox.lock:
            record = sandbox.record
            if record.phase is not RecordPhase.ACTIVE or record.failure is None:
                return
            sandbox.intentional |= sandbox.container_ids
            if not await self._stop_workload(sandbox, record.workload_id) or not record.supervisor_id:
                return
            try:
                await remove_container(self._services.engine, record.supervisor_id)
            except EngineError as error:
                self._services.log_of(sandbox).error("supervisor not removed", error=error.message)
            else:
                sandbox.record = replace(sandbox.record, supervisor_id="")
                sandbox.forget(record.supervisor_id)
                await self._services.save_quietly(sandbox)

    async def _end_restarts(self, sandbox: Sandbox, workload: str) -> None:
        async with sandbox.lock:
            if self._is_news(sandbox, workload):
                sandbox.intentional.add(workload)
                await self._stop_workload(sandbox, workload)

    async def _stop_workload(self, sandbox: Sandbox, workload: str) -> bool:
        """Stop the workload; whether it has ended for certain."""
        services = self._services
        try:
            sandbox.workload = await stop_workload(
                services.engine, workload, grace_seconds=services.config.stop_grace_seconds
            )
        except EngineAbsentError:
            return True
        except EngineError as error:
            services.log_of(sandbox).error("workload not stopped", error=error.message)
            return False
        return not sandbox.workload.status.is_alive

    @staticmethod
    async def _wait(sandbox: Sandbox, done: Callable[[], bool], seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                while not done():
                    await sandbox.moved.wait()
        except TimeoutError:
            return


def failure_of(verdict: Verdict) -> Failure:
    """A verdict as the record and the condition carry it."""
    return Failure(
        reason=verdict.reason,
        message=verdict.message,
        at=verdict.finished_at or now(),
        verdict=verdict.to_metadata(),
        untold=True,
    )
