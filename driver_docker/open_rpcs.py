"""The RPCs that are open: how many watches there may be, and with which words they end when the driver does."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, TypeVar

from driver_docker.concurrency import settled
from driver_docker.errors import DriverError, ShuttingDownError
from openshell.status import StatusCode

if TYPE_CHECKING:
    from collections.abc import Coroutine

    import grpc


MAX_WATCHES: Final = 64
"""Watches at a time. Far below the server's bound of all RPCs, so that they never starve the others."""
_CANCEL_SECONDS: Final = 0.3

Result = TypeVar("Result")


class TooManyWatchesError(DriverError):
    """As many watches are open as the driver serves."""

    default_reason = "TooManyWatches"
    default_status = StatusCode.RESOURCE_EXHAUSTED
    default_retryable = True


class OpenRpcs:
    """The open RPCs of one server. Belongs to the event loop's thread."""

    def __init__(self, *, max_watches: int = MAX_WATCHES) -> None:
        self._max_watches = max_watches
        self._watches = 0
        self._unary: set[asyncio.Task[Any]] = set()
        self._ending = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def admit_watch(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Count a watch until its RPC is over for the library too, which a peer that does not read may put off.

        Raises:
            TooManyWatchesError: There are as many as there may be.
        """
        if self._watches >= self._max_watches:
            raise TooManyWatchesError(
                f"{self._watches} watches are open already, as many as the driver serves; end one and try again"
            )
        self._watches += 1
        context.add_done_callback(self._watch_over)  # type: ignore[arg-type] # its stub asks for keywords

    def _watch_over(self, _: object) -> None:
        self._watches -= 1

    async def answer(self, call: Coroutine[Any, Any, Result]) -> Result:
        """Await what an RPC asks for, to its end or the driver's.

        Raises:
            ShuttingDownError: The driver ends; the call was cancelled.
        """
        task = asyncio.create_task(call)
        self._unary.add(task)
        self._idle.clear()
        task.add_done_callback(self._answered)
        ending = asyncio.create_task(self._ending.wait())
        try:
            await asyncio.wait({task, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=_CANCEL_SECONDS)
            if not task.done() or task.cancelled():
                raise ShuttingDownError("the driver shut down before this was done; try again once it is back")
            return task.result()
        except asyncio.CancelledError:
            task.cancel()
            await settled(asyncio.gather(task, return_exceptions=True))
            raise
        finally:
            ending.cancel()

    def _answered(self, task: asyncio.Task[Any]) -> None:
        self._unary.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved: its caller may have been answered already
        if not self._unary:
            self._idle.set()

    async def drained(self) -> None:
        """Return once no call is under way."""
        await self._idle.wait()

    def end(self) -> None:
        """Cancel every call that is under way and tell its caller that the driver ends. Idempotent."""
        self._ending.set()
