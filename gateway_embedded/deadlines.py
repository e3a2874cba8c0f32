"""Ends provisioning attempts whose time is up, and reclaims their compute (isolation contract 5.5)."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timedelta

import structlog

from gateway_embedded import phases
from gateway_embedded.admission import REPAIR_WINDOW
from gateway_embedded.background import BackgroundTasks
from gateway_embedded.config import Deadlines
from gateway_embedded.driver_link import DriverLink
from gateway_embedded.errors import DriverCallError, GatewayError
from gateway_embedded.sandboxes import AdmissionState, Phase, SandboxRecord
from gateway_embedded.sessions import SessionEnd
from gateway_embedded.states import SandboxStates, with_view
from openshell.status import StatusCode

IMAGE_PREPARATION_TEXT = "Image preparation or initial supervisor startup exceeded its absolute deadline"

_WAITING = (Phase.PROVISIONING, Phase.STARTING)


class DeadlineKeeper:
    """Knows when the next attempt expires and sleeps until then; a change of any sandbox wakes it."""

    def __init__(self, states: SandboxStates, driver: DriverLink, tasks: BackgroundTasks, limits: Deadlines) -> None:
        self._states = states
        self._driver = driver
        self._tasks = tasks
        self._limits = limits
        self._due: dict[str, datetime] = {}
        self._wake = asyncio.Event()
        self._log = structlog.get_logger("gateway.deadlines")
        states.listen(self.note)

    def note(self, record: SandboxRecord) -> None:
        """Take over the deadline of a changed sandbox."""
        deadline = record.provisioning.next_deadline
        if record.status.phase in _WAITING and deadline is not None:
            self._due[record.id] = deadline
        else:
            self._due.pop(record.id, None)
        self._wake.set()

    def resume(self, stored: Iterable[SandboxRecord]) -> None:
        """Take up what an earlier process left: deadlines, and reclamations that it did not finish."""
        for record in stored:
            self.note(record)
            if record.provisioning.timeout_time is not None and record.provisioning.cleanup_completed_time is None:
                self._reclaim_later(record)

    async def run(self) -> None:
        """Expire attempts until cancelled."""
        while True:
            self._wake.clear()
            now = self._states.clock()
            for sandbox_id in [sandbox_id for sandbox_id, due in self._due.items() if due <= now]:
                try:
                    await self.expire(sandbox_id)
                except GatewayError as error:
                    self._log.warning("a deadline is due again later", sandbox_id=sandbox_id, error=error.message)
            wait = min((due - now).total_seconds() for due in self._due.values()) if self._due else None
            try:
                async with asyncio.timeout(None if wait is None else max(wait, 0.01)):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def expire(self, sandbox_id: str) -> None:
        """End an attempt that is over time with Error, and have the driver stop what it made.

        Raises:
            GatewayError: That could not be stored; it is tried again.
        """
        self._due.pop(sandbox_id, None)
        try:
            record = await self._states.change_if_stored(sandbox_id, self._timed_out)
        except GatewayError:
            self._due[sandbox_id] = self._states.clock() + timedelta(seconds=self._limits.cleanup_retry_seconds)
            self._wake.set()
            raise
        if record is None or record.provisioning.timeout_time is None:
            return
        self._log.warning("provisioning timed out", sandbox_id=sandbox_id, sandbox=record.name)
        self._states.sessions.end(sandbox_id, SessionEnd.STOPPED)
        self._reclaim_later(record)

    def _timed_out(self, record: SandboxRecord) -> SandboxRecord | None:
        now = self._states.clock()
        due = record.provisioning.next_deadline
        if record.status.phase not in _WAITING or due is None or due > now:
            return None
        admission = record.status.admission
        if record.provisioning.admission_start_time is None:
            reason, message = "ImagePreparationTimedOut", IMAGE_PREPARATION_TEXT
        else:
            window = int(REPAIR_WINDOW.total_seconds())
            reason, message = "ProvisioningTimedOut", f"Provisioning repair window expired after {window} seconds"
            if admission is not None and admission.state is AdmissionState.REJECTED and admission.error:
                message += f": {admission.error}"
        view = phases.fail(self._states.inputs(record), reason=reason, message=message)
        return replace(with_view(record, view), provisioning=replace(record.provisioning, timeout_time=now))

    def _reclaim_later(self, record: SandboxRecord) -> None:
        self._tasks.spawn(self._reclaim(record), name=f"reclaim {record.id}")

    async def _reclaim(self, record: SandboxRecord) -> None:
        """Stop the attempt's compute; try again until it worked or the sandbox is gone."""
        while self._states.knows(record.id):
            error = ""
            try:
                await self._driver.stop(record.id, record.name, timeout_seconds=self._limits.cleanup_stop_seconds)
            except DriverCallError as failure:
                if failure.status is not StatusCode.NOT_FOUND:
                    error = failure.public_message
            try:
                await self._states.change_if_stored(record.id, functools.partial(self._reclaimed, error=error))
            except GatewayError as failure:
                error = failure.public_message
                self._log.warning("a reclamation could not be stored yet", sandbox_id=record.id, error=error)
            if not error:
                return
            await asyncio.sleep(self._limits.cleanup_retry_seconds)

    def _reclaimed(self, record: SandboxRecord, *, error: str) -> SandboxRecord:
        provisioning = replace(record.provisioning, cleanup_error=error)
        if not error:
            provisioning = replace(provisioning, cleanup_completed_time=self._states.clock())
        return replace(record, provisioning=provisioning)
