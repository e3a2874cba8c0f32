"""Tasks that outlive the call that started them: owned here, awaited at the end, never lost silently."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import structlog

_T = TypeVar("_T")


class BackgroundTasks:
    """Owner of detached work. Failures are logged, and `close` waits until nothing is left."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._log = structlog.get_logger("gateway.background")

    def spawn(self, work: Coroutine[Any, Any, _T], *, name: str) -> asyncio.Task[_T]:
        """Start work that nobody has to wait for; whoever does gets its result. Its failure is logged."""
        task = self._start(work, name)
        task.add_done_callback(self._log_failure)
        return task

    async def finished(self, work: Coroutine[Any, Any, _T], *, name: str) -> _T:
        """Wait for work that goes on to its end even when the caller is cancelled; its failure is the caller's."""
        task = self._start(work, name)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.done():
                task.add_done_callback(self._log_failure)
            raise

    def _start(self, work: Coroutine[Any, Any, _T], name: str) -> asyncio.Task[_T]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def settle(self) -> None:
        """Wait until no task is left; for tests and for an orderly end."""
        while self._tasks:
            await asyncio.wait(tuple(self._tasks))

    async def close(self, *, grace_seconds: float) -> None:
        """Give the tasks some time to finish, then cancel and await them."""
        if self._tasks:
            await asyncio.wait(tuple(self._tasks), timeout=grace_seconds)
        for task in tuple(self._tasks):
            task.cancel()
        await self.settle()

    def _log_failure(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self._log.warning(
                "background work failed", task=task.get_name(), error=str(error), kind=type(error).__name__
            )
