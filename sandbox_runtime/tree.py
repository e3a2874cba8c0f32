"""Everything below PID 1: signal it, freeze it, resume it, end it.

A process cannot leave the tree: when its parent ends, the kernel gives it to PID 1. A cgroup freezer would be simpler,
but a container without privileges has no writable cgroup, so freezing is SIGSTOP until nothing runs any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sandbox_runtime.errors import TreeError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sandbox_runtime.reaper import Reaper

GRACE_SECONDS = 2.0
"""How long processes have between SIGTERM and SIGKILL."""
REAP_SECONDS = 2.0
"""How long SIGKILL may take to empty the tree (isolation contract 3.6: forced-kill reap)."""
FREEZE_SECONDS = 2.0
"""How long SIGSTOP may take to reach every process."""
_FIRST_PAUSE_SECONDS = 0.001
_LONGEST_PAUSE_SECONDS = 0.025
_RESWEEP_SECONDS = 0.1

_ENDED = frozenset("ZXx")
_STOPPED = frozenset("Tt")
_UNINTERRUPTIBLE = "D"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEntry:
    """What ``/proc/PID/stat`` says of a process."""

    pid: int
    parent_pid: int
    state: str
    """The kernel's letter: R, S, D, T, t, Z, X or I."""
    threads: int = 1
    start_ticks: int
    """Start time in clock ticks since boot; tells a reused pid from the first process that had it."""

    @property
    def ended(self) -> bool:
        """Whether it is only waiting to be reaped."""
        return self.state in _ENDED

    @property
    def identity(self) -> tuple[int, int]:
        """Pid and start time: no other process ever has the same."""
        return (self.pid, self.start_ticks)


def parse_stat(text: bytes) -> ProcessEntry:
    """Parse one ``/proc/PID/stat``.

    The command name stands in parentheses and may itself hold spaces and parentheses, so the last one counts.

    Raises:
        ValueError: The text is not a stat line.
    """
    head, separator, tail = text.rpartition(b") ")
    if not separator:
        raise ValueError("no command name in the stat line")
    pid, _, _ = head.partition(b" ")
    fields = tail.split()
    if len(fields) < 20:
        raise ValueError("the stat line is too short")
    return ProcessEntry(
        pid=int(pid),
        parent_pid=int(fields[1]),
        state=fields[0].decode("ascii"),
        threads=int(fields[17]),
        start_ticks=int(fields[19]),
    )


def liveliest(states: Iterable[str]) -> str:
    """The state of a process whose threads are in *states*: it runs while one runs, and has ended when all have.

    A process's own line tells the state of its first thread only, which may have ended while others run.
    """

    def rank(state: str) -> int:
        return 3 if state in _ENDED else 2 if state in _STOPPED else 1 if state == _UNINTERRUPTIBLE else 0

    return min(states, key=rank, default="Z")


def descendants(entries: Iterable[ProcessEntry], root_pid: int) -> tuple[ProcessEntry, ...]:
    """The processes below *root_pid*, parents before their children."""
    children: dict[int, list[ProcessEntry]] = {}
    for entry in entries:
        children.setdefault(entry.parent_pid, []).append(entry)
    found: list[ProcessEntry] = []
    waiting = [root_pid]
    while waiting:
        for entry in children.pop(waiting.pop(), ()):
            found.append(entry)
            waiting.append(entry.pid)
    return tuple(found)


class ProcessTree:
    """The processes below one process, which must be PID 1 or a child subreaper.

    Args:
        reaper: The owner of waitpid in that process.
        root_pid: The process itself; it is never signaled.
        proc: Where procfs is mounted.
    """

    def __init__(self, *, reaper: Reaper, root_pid: int | None = None, proc: Path = Path("/proc")) -> None:
        self._reaper = reaper
        self._root_pid = os.getpid() if root_pid is None else root_pid
        self._proc = proc
        self._frozen: set[tuple[int, int]] = set()
        """Pid and start time of what was stopped here, so that resuming wakes nothing that had stopped by itself."""

    def members(self) -> tuple[ProcessEntry, ...]:
        """What is below the root now, parents before their children. Ended ones are included until they are reaped."""
        entries = []
        for name in os.listdir(self._proc):  # noqa: PTH208 - names only, and there may be thousands
            if name.isdigit():
                try:
                    entries.append(parse_stat((self._proc / name / "stat").read_bytes()))
                except (FileNotFoundError, ProcessLookupError):
                    continue  # it ended while we looked
        found = descendants(entries, self._root_pid)
        return tuple(entry if entry.threads <= 1 else self._with_threads(entry) for entry in found)

    def _with_threads(self, entry: ProcessEntry) -> ProcessEntry:
        states = []
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for thread in (self._proc / str(entry.pid) / "task").iterdir():
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    states.append(parse_stat((thread / "stat").read_bytes()).state)
        return replace(entry, state=liveliest(states))

    def signal(self, number: signal.Signals) -> int:
        """Send *number* to every member. Returns how many it was sent to."""
        return sum(_send(entry.pid, number) for entry in self.members() if not entry.ended)

    async def freeze(self) -> int:
        """Stop every member and return how many are stopped, once nothing in the tree runs any more.

        Raises:
            TreeError: Something still ran after :data:`FREEZE_SECONDS`.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + FREEZE_SECONDS
        pause = _FIRST_PAUSE_SECONDS
        previous: Sequence[ProcessEntry] | None = None
        while True:
            members = self.members()
            moving = [entry for entry in members if not self._is_still(entry)]
            if not moving and previous == members:
                return sum(not entry.ended for entry in members)
            # A listing is not atomic: a process that was forked behind its back shows up in the next one.
            previous = members if not moving else None
            for entry in members:
                if not entry.ended and entry.state not in _STOPPED:
                    self._frozen.add(entry.identity)
                    _send(entry.pid, signal.SIGSTOP)
            if loop.time() >= deadline:
                pids = ", ".join(str(entry.pid) for entry in moving[:5])
                raise TreeError(f"{len(moving)} processes still ran {FREEZE_SECONDS:g} s after SIGSTOP (pids {pids})")
            # The kernel tells nobody but the parent when a process has stopped, so look again shortly.
            await asyncio.sleep(pause if moving else 0)
            pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)

    def _is_still(self, entry: ProcessEntry) -> bool:
        """Whether it executes nothing of its own any more.

        In uninterruptible sleep a process keeps the SIGSTOP that it was sent and obeys before it runs again. That can
        last: the parent of a vfork sleeps so until its child, which is stopped, has called execve.
        """
        if entry.state == _UNINTERRUPTIBLE:
            return entry.identity in self._frozen
        return entry.ended or entry.state in _STOPPED

    def resume(self) -> int:
        """Continue what :meth:`freeze` stopped. Returns how many processes were continued.

        Children come first: a shell that wakes up must not find its job stopped.
        """
        frozen, self._frozen = self._frozen, set()
        return sum(
            _send(entry.pid, signal.SIGCONT)
            for entry in reversed(self.members())
            if entry.identity in frozen and not entry.ended
        )

    async def terminate(self, *, grace_seconds: float = GRACE_SECONDS) -> None:
        """End every member: SIGTERM, then SIGKILL after the grace, until nothing is left.

        Args:
            grace_seconds: Time for an orderly end; 0 kills at once, which also ends a frozen tree without letting it
                run again.

        Raises:
            TreeError: Something was left :data:`REAP_SECONDS` after the first SIGKILL.
        """
        if grace_seconds > 0:
            self.signal(signal.SIGTERM)
            self.signal(signal.SIGCONT)  # a stopped process cannot act on SIGTERM
            if await self._emptied(grace_seconds):
                return
        loop = asyncio.get_running_loop()
        deadline = loop.time() + REAP_SECONDS
        while True:
            self.signal(signal.SIGKILL)
            if await self._emptied(_RESWEEP_SECONDS):  # again for what was forked during the sweep
                return
            if loop.time() >= deadline:
                left = [entry for entry in self.members() if not entry.ended]
                raise TreeError(f"{len(left)} processes are left {REAP_SECONDS:g} s after SIGKILL")

    async def _emptied(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._reaper.wait_childless()
        except TimeoutError:
            return False
        self._frozen.clear()
        return True


def _send(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
