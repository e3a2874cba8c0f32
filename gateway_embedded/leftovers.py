"""What the driver may still hold of a sandbox that is no longer stored: removed, until the driver says that it did."""

from __future__ import annotations

import asyncio

import structlog

from gateway_embedded.background import BackgroundTasks
from gateway_embedded.driver_link import DriverLink
from gateway_embedded.errors import DriverCallError

_LONGEST_PAUSE_SECONDS = 300.0


class Leftovers:
    """Nobody else remembers such a sandbox: watch and sweep ignore ids that are not stored."""

    def __init__(self, driver: DriverLink, tasks: BackgroundTasks, *, retry_seconds: float) -> None:
        self._driver = driver
        self._tasks = tasks
        self._retry_seconds = retry_seconds
        self._log = structlog.get_logger("gateway.leftovers")

    def remove_later(self, sandbox_id: str, name: str) -> None:
        """Have what is left of a sandbox removed in the background; the call is idempotent (contract 3.8)."""
        self._tasks.spawn(self._remove(sandbox_id, name), name=f"delete leftovers of {sandbox_id}")

    async def _remove(self, sandbox_id: str, name: str) -> None:
        pause = self._retry_seconds
        while True:
            try:
                await self._driver.delete(sandbox_id, name)
            except DriverCallError as error:
                self._log.warning(
                    "leftovers could not be removed yet", sandbox_id=sandbox_id, error=error.public_message
                )
            else:
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
