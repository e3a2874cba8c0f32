"""The one owner of ``waitpid(-1)``.

Every orphan in the container becomes a child of PID 1, so any child may end at any time and nobody else may wait for
one. A child is registered in the same step in which it is spawned, and reaping happens on the same thread, so an end
cannot fall between the two.
"""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True, kw_only=True)
class EndStatus:
    """How a process ended: exactly one of the two is set."""

    exit_code: int | None = None
    signal_number: int | None = None

    @property
    def shell_code(self) -> int:
        """The code by the shell's convention: the exit code, or 128 + the signal's number."""
        if self.signal_number is not None:
            return 128 + self.signal_number
        return self.exit_code or 0

    def __str__(self) -> str:
        if self.signal_number is None:
            return f"exited with code {self.exit_code}"
        try:
            name = signal.Signals(self.signal_number).name
        except ValueError:
            name = f"signal {self.signal_number}"
        return f"ended by {name}"


class Child:
    """A spawned process whose end will be, or was, delivered."""

    def __init__(self, pid: int, loop: asyncio.AbstractEventLoop) -> None:
        self.pid = pid
        self._ended: asyncio.Future[EndStatus] = loop.create_future()

    @property
    def status(self) -> EndStatus | None:
        """How it ended; None while it lives."""
        return self._ended.result() if self._ended.done() else None

    async def wait(self) -> EndStatus:
        """How it ended, as soon as it did. Any number of callers may wait; a cancelled one disturbs no other."""
        return await asyncio.shield(self._ended)

    def _deliver(self, status: EndStatus) -> None:
        self._ended.set_result(status)


class Reaper:
    """Collects every child that ends and tells those who asked.

    Call :meth:`reap` on each SIGCHLD, on the thread of the event loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._children: dict[int, Child] = {}
        self._reaped = asyncio.Event()
        self._orphans = 0

    @property
    def orphans_reaped(self) -> int:
        """How many processes that nobody had spawned through this reaper were collected."""
        return self._orphans

    def spawn(self, start: Callable[[], int]) -> Child:
        """Run *start*, which returns the pid of the process that it made, and register that pid at once.

        Raises:
            OSError: *start* failed; nothing was registered.
        """
        child = Child(start(), self._loop)
        self._children[child.pid] = child
        return child

    def reap(self) -> bool:
        """Collect every child that has ended. Returns whether a child is left."""
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)
            except ChildProcessError:
                self._announce()
                return False
            if found is None:
                return True
            if found.si_code == os.CLD_EXITED:
                status = EndStatus(exit_code=found.si_status)
            else:
                status = EndStatus(signal_number=found.si_status)
            child = self._children.pop(found.si_pid, None)
            if child is None:
                self._orphans += 1
            else:
                child._deliver(status)  # noqa: SLF001 - the reaper is the one who may
            self._announce()

    async def wait_childless(self) -> None:
        """Return once this process has no child, living or ended.

        As orphans come to PID 1, having no child means that nothing is left below it.
        """
        while self.reap():
            await self._next()

    async def _next(self) -> None:
        await self._reaped.wait()

    def _announce(self) -> None:
        # Wakes those who wait now; whoever comes later waits for the next one.
        self._reaped.set()
        self._reaped = asyncio.Event()
