"""Follows the compute driver: one stream, opened again when it ends, and a sweep that repairs what it missed."""

from __future__ import annotations

import asyncio

import structlog

from gateway_embedded import encoding, phases
from gateway_embedded.config import DriverTimings
from gateway_embedded.driver_link import DriverLink
from gateway_embedded.encoding import TimestampRangeError
from gateway_embedded.errors import DriverCallError, GatewayError
from gateway_embedded.events import is_lasting
from gateway_embedded.leftovers import Leftovers
from gateway_embedded.sandboxes import Phase, SandboxRecord
from gateway_embedded.states import SandboxStates, with_view
from openshell.status import StatusCode
from openshell.wire.compute.v1 import compute_driver_pb2

MISSING_TEXT = (
    "The compute driver could not find the retained sandbox resource; "
    "delete the sandbox to clean up its remaining state"
)

_RETAINED = (Phase.STOPPING, Phase.STOPPED, Phase.STARTING)


class DriverObserver:
    """Applies what the driver tells, one event at a time (compute-driver contract 3.10 and 3.11)."""

    def __init__(self, states: SandboxStates, driver: DriverLink, leftovers: Leftovers, timings: DriverTimings) -> None:
        self._states = states
        self._driver = driver
        self._leftovers = leftovers
        self._timings = timings
        self._log = structlog.get_logger("gateway.observer")

    async def follow(self) -> None:
        """Keep one watch open until cancelled; the same failure is told once, however often it is tried again."""
        told = ""
        while True:
            try:
                async with self._driver.watch() as events:
                    async for event in events:
                        if told:
                            self._log.info("the compute driver is back and followed again")
                            told = ""
                        await self._apply(event)
                self._log.info("the driver ended its watch; opening it again")
                told = ""
            except DriverCallError as error:
                if error.public_message != told:
                    self._log.warning("the driver's watch broke; opening it again", error=error.public_message)
                    told = error.public_message
            await asyncio.sleep(self._timings.watch_reopen_seconds)

    async def sweep_regularly(self) -> None:
        """Compare stored and actual sandboxes now and after every interval, until cancelled."""
        while True:
            try:
                await self.sweep()
            except GatewayError as error:
                self._log.warning("the reconcile sweep failed", reason=error.reason, error=error.public_message)
            await asyncio.sleep(self._timings.reconcile_interval_seconds)

    async def sweep(self) -> None:
        """One comparison (compute-driver contract 3.10).

        Raises:
            DriverCallError: The driver did not list its sandboxes; nothing was changed for that.
        """
        before = {record.id: record for record in await self._states.store.all()}
        listed = {sandbox.id for sandbox in await self._driver.list()}
        for sandbox_id, record in before.items():
            if sandbox_id in listed:
                await self._refresh(record)
            else:
                await self._look_for(record)

    async def _refresh(self, record: SandboxRecord) -> None:
        """Re-read one sandbox; the answer counts only if nobody changed the sandbox meanwhile."""
        try:
            snapshot = encoding.from_driver_sandbox(await self._driver.get(record.id, record.name))
        except (DriverCallError, TimestampRangeError) as error:
            self._log.info("a sandbox could not be re-read", sandbox_id=record.id, error=str(error))
            return

        def decide(found: SandboxRecord) -> SandboxRecord | None:
            if found.resource_version != record.resource_version:
                return None
            return self._states.observed(found, snapshot)

        await self._states.change_if_stored(record.id, decide)

    async def _look_for(self, record: SandboxRecord) -> None:
        """Settle a sandbox that the driver does not list; only its certain absence counts."""
        age = (self._states.clock() - record.created_at).total_seconds()
        if record.status.phase is not Phase.DELETING and age < self._timings.orphan_grace_seconds:
            return
        try:
            await self._driver.get(record.id, record.name)
        except DriverCallError as error:
            if error.status is not StatusCode.NOT_FOUND:
                return
        else:
            return
        if record.status.phase in _RETAINED:
            await self._states.change_if_stored(record.id, self._missing)
            return
        self._log.warning("the driver no longer has a sandbox; removing it", sandbox_id=record.id, sandbox=record.name)
        await self._states.remove(record.id)
        self._leftovers.remove_later(record.id, record.name)

    def _missing(self, record: SandboxRecord) -> SandboxRecord | None:
        if record.status.phase not in _RETAINED:
            return None
        inputs = self._states.inputs(record)
        return with_view(record, phases.fail(inputs, reason="ComputeResourceMissing", message=MISSING_TEXT))

    async def _apply(self, event: compute_driver_pb2.WatchSandboxesEvent) -> None:
        try:
            match event.WhichOneof("payload"):
                case "sandbox":
                    await self._apply_snapshot(event.sandbox.sandbox)
                case "deleted":
                    await self._apply_deletion(event.deleted.sandbox_id)
                case "platform_event":
                    await self._apply_event(event.platform_event)
                case _:
                    self._log.debug("the driver sent an event of an unknown kind")
        except (TimestampRangeError, GatewayError) as error:
            self._log.warning("an event of the driver was dropped", error=str(error))

    async def _apply_snapshot(self, message: compute_driver_pb2.DriverSandbox) -> None:
        if not self._states.knows(message.id):
            return
        snapshot = encoding.from_driver_sandbox(message)
        record = await self._states.change_if_stored(message.id, lambda found: self._states.observed(found, snapshot))
        if record is not None and snapshot.name != record.name:
            # A driver must echo the gateway's name; taking over another one would rename a user's sandbox.
            self._log.warning("the driver does not echo a sandbox's name", sandbox_id=record.id, name=snapshot.name)

    async def _apply_deletion(self, sandbox_id: str) -> None:
        record = await self._states.store.get(sandbox_id)
        if record is None:
            return
        await self._states.remove(sandbox_id)
        if record.status.phase is not Phase.DELETING:
            self._log.warning("a sandbox was removed outside the gateway", sandbox_id=sandbox_id, sandbox=record.name)
            self._leftovers.remove_later(record.id, record.name)

    async def _apply_event(self, message: compute_driver_pb2.WatchSandboxesPlatformEvent) -> None:
        if not self._states.knows(message.sandbox_id):
            return
        event = encoding.from_driver_event(message.event)
        if is_lasting(event):
            await self._states.store.keep_event(message.sandbox_id, event)
            if not self._states.knows(message.sandbox_id):
                return
        self._states.hub.publish_event(message.sandbox_id, event)
