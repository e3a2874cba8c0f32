"""Following the engine: one event reader, and a look at everything after each (re)connect and on a slow timer.

Events are never trusted alone: what happened while nobody listened is found by the look that follows each connect, and
an outage of the engine is no news about any sandbox.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Final

from driver_docker import events, labels
from driver_docker.engine import EngineError, EngineUnreachableError
from driver_docker.engine_objects import ContainerStatus
from driver_docker.sandbox_record import RecordPhase
from openshell.verdicts import Component

if TYPE_CHECKING:
    from driver_docker.concurrency import Background
    from driver_docker.engine import EventStream
    from driver_docker.engine_objects import ContainerRow, EngineEvent
    from driver_docker.exits import Exits
    from driver_docker.lifecycle import Lifecycle
    from driver_docker.sandboxes import Sandbox
    from driver_docker.services import Services

_KIND: Final = "container"
_FIRST_PAUSE_SECONDS: Final = 0.1
_LONGEST_PAUSE_SECONDS: Final = 30.0
_LOOK_SECONDS: Final = 10.0
TOLD: Final = frozenset({"die", "destroy", "kill", "oom", "pause", "unpause", "start"})


class Observer:
    """Turns what the engine tells into what sandboxes do."""

    def __init__(self, services: Services, lifecycle: Lifecycle, exits: Exits, background: Background) -> None:
        self._services = services
        self._lifecycle = lifecycle
        self._exits = exits
        self._background = background
        self._connected = asyncio.Event()
        self._looked = False
        self._doubted = asyncio.Event()

    async def connected(self) -> None:
        """Return once events are being read for the first time."""
        await self._connected.wait()

    async def follow(self) -> None:
        """Read events until cancelled; reconnect after each loss, ever more slowly while the engine stays away."""
        pause = _FIRST_PAUSE_SECONDS
        while True:
            self._looked = False
            try:
                await self._read()
            except EngineError as error:
                self._services.log.warning("engine events lost", error=error.message)
            except Exception:
                # Whatever it was: a driver that stops observing serves on, blind, and nobody hears of it.
                self._services.log.exception("engine events lost unexpectedly")
            else:
                return  # the stream was closed on purpose
            self._services.engine_events(False)
            pause = _FIRST_PAUSE_SECONDS if self._looked else min(pause * 2, _LONGEST_PAUSE_SECONDS)
            await asyncio.sleep(pause * random.uniform(0.75, 1.25))  # noqa: S311 - spreads load, keeps no secret

    async def _read(self) -> None:
        stream = await self._services.engine.subscribe(
            kind=_KIND, actions=TOLD, labels=labels.owner_labels(self._services.owner)
        )
        self._services.event_stream += 1
        try:
            await self.look_at_all()
            self._looked = True
            if self._connected.is_set():
                self._tell_all()
            self._connected.set()
            self._services.events_are_read = True
            self._services.engine_events(True)
            await self._take_all(stream)
        finally:
            self._services.events_are_read = False
            await stream.close()

    def _tell_all(self) -> None:
        """After an outage, say once how everything is."""
        for sandbox in self._services.table:
            if sandbox.record.phase is RecordPhase.ACTIVE:
                self._services.publish_snapshot(sandbox)

    async def _take_all(self, stream: EventStream) -> None:
        """Take events until the stream ends, or until it may be dead without having ended.

        Raises:
            EngineUnreachableError: It was lost, or the engine no longer answers.
        """
        self._doubted.clear()
        taking = asyncio.create_task(self._take_each(stream), name="taking engine events")
        doubting = asyncio.create_task(self._doubted.wait(), name="doubting engine events")
        try:
            await asyncio.wait({taking, doubting}, return_when=asyncio.FIRST_COMPLETED)
            if not taking.done():
                raise EngineUnreachableError("the engine's events may be missing; they are read anew")
            taking.result()
        finally:
            taking.cancel()
            doubting.cancel()
            await asyncio.wait({taking, doubting})

    async def _take_each(self, stream: EventStream) -> None:
        async for event in stream:
            self.take(event)

    async def look_now_and_then(self) -> None:
        """Look at everything on a slow timer until cancelled, in case an event was lost."""
        while True:
            await asyncio.sleep(self._services.config.resync_interval_seconds)
            try:
                async with asyncio.timeout(_LOOK_SECONDS):
                    found = await self.look_at_all()
            except (EngineError, TimeoutError) as error:
                self._services.log.warning("look at all containers failed", error=str(error) or "no answer in time")
                self._doubted.set()  # its stream may be as dead, and would never say so
            except Exception:
                self._services.log.exception("look at all containers failed unexpectedly")
                self._doubted.set()
            else:
                if found:
                    self._services.log.warning("a look found what no event had told")
                    self._doubted.set()

    def take(self, event: EngineEvent) -> None:
        """Handle one event. Never waits: what takes time becomes a task."""
        if event.action not in TOLD:
            return
        sandbox = self._services.table.by_id(event.attributes.get(labels.SANDBOX_ID, ""))
        if sandbox is None or event.object_id not in sandbox.container_ids:
            return  # of an earlier run, or of somebody else
        if sandbox.is_old(event, stream=self._services.event_stream):
            return
        if event.action == "start":
            if event.object_id == sandbox.record.workload_id and sandbox.record.phase is RecordPhase.STOPPED:
                self._lifecycle.resume(sandbox)
            return
        sandbox.add_event(event)
        if event.object_id in sandbox.intentional:
            return
        if event.action in {"die", "destroy"}:
            self._exits.look(sandbox)
        elif event.action == "oom":
            self._tell_oom(sandbox, event)
        elif event.action in {"pause", "unpause"}:
            if event.object_id == sandbox.record.workload_id:
                self._background.spawn(self._look_again(sandbox), name=f"look at {sandbox.sandbox_id}")
            elif sandbox.note_supervisor(paused=event.action == "pause"):
                self._services.publish_snapshot(sandbox)

    def _tell_oom(self, sandbox: Sandbox, event: EngineEvent) -> None:
        """Any process of the container may have been the victim, so this is no exit, and the phase stays."""
        component = Component.SUPERVISOR if event.object_id == sandbox.record.supervisor_id else Component.WORKLOAD
        self._services.publish(
            events.warning(
                sandbox.sandbox_id,
                event.time,
                reason="OutOfMemory",
                message=f"a process in the {component.value} container was killed for lack of memory",
            )
        )

    async def _look_again(self, sandbox: Sandbox) -> None:
        try:
            await self._lifecycle.refresh(sandbox)
        except EngineError as error:
            self._services.log_of(sandbox).warning("container could not be looked at", error=error.message)
        else:
            self._services.publish_snapshot(sandbox)

    async def look_at_all(self) -> bool:
        """Compare every sandbox with the engine's list and handle what no event told.

        Returns:
            Whether there was anything that an event should have told.

        Raises:
            EngineUnreachableError: The engine cannot be asked; nothing is concluded.
        """
        self._background.spawn(self._services.save_unsaved(), name="records that were not written")
        self._background.spawn(self._services.look_at_folder(), name="look at the state folder")
        asked = {sandbox: sandbox.run for sandbox in self._services.table if sandbox.record.phase is RecordPhase.ACTIVE}
        rows = await self._services.engine.list_containers(labels.owner_labels(self._services.owner))
        by_id = {row.container_id: row for row in rows}
        found = False
        for sandbox in self._services.table:
            phase = sandbox.record.phase
            if phase is RecordPhase.ACTIVE and sandbox.record.failure is None:
                if asked.get(sandbox) == sandbox.run:
                    found |= await self._compare(sandbox, by_id)
            elif phase is RecordPhase.PROVISIONING:
                sandbox.notify()
            elif phase is RecordPhase.FAILED:
                if not sandbox.cleared or any(row.labels.get(labels.SANDBOX_ID) == sandbox.sandbox_id for row in rows):
                    self._lifecycle.resume(sandbox)
            elif phase is RecordPhase.STOPPED:
                workload = by_id.get(sandbox.record.workload_id)
                if workload is not None and workload.status.is_alive:
                    self._lifecycle.resume(sandbox)
            else:
                sandbox.notify()
                self._lifecycle.resume(sandbox)
        return found

    async def _compare(self, sandbox: Sandbox, rows: dict[str, ContainerRow]) -> bool:
        """Handle the differences between a sandbox and its rows; whether there was one that no event told."""
        record = sandbox.record
        workload, supervisor = rows.get(record.workload_id), rows.get(record.supervisor_id)
        workload_ended = workload is None or not workload.status.is_alive
        supervisor_ended = supervisor is None or not supervisor.status.is_alive
        if workload_ended or supervisor_ended:
            untold = (workload_ended and not _is_told(sandbox, record.workload_id)) or (
                supervisor_ended and not _is_told(sandbox, record.supervisor_id)
            )
            if workload_ended and supervisor_ended:
                self._exits.both_ended(sandbox)
            else:
                self._exits.ended(sandbox, Component.WORKLOAD if workload_ended else Component.SUPERVISOR)
            return untold
        seen = sandbox.workload
        paused = supervisor is not None and supervisor.status is ContainerStatus.PAUSED
        untold = sandbox.note_supervisor(paused=paused)
        if untold:
            self._services.publish_snapshot(sandbox)
        if workload is None or (seen is not None and seen.status is workload.status):
            return untold
        sandbox.heard += 1
        try:
            await self._lifecycle.refresh(sandbox)
        except EngineUnreachableError:
            raise
        except EngineError:
            return False
        self._services.publish_snapshot(sandbox)
        return seen is not None


def _is_told(sandbox: Sandbox, container: str) -> bool:
    """Whether the end of a container is known already: an event told it, or it is being handled or expected."""
    return container in sandbox.judged | sandbox.intentional or sandbox.has_event(container, "die", "destroy")
