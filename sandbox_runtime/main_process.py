"""The agent: one process, started once, with its streams."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from openshell.isolation.errors import cause_of
from sandbox_runtime.errors import LaunchError
from sandbox_runtime.launch import Program, launch
from sandbox_runtime.output import OutputBuffer, OutputChannel, OutputDrain

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sandbox_runtime.reaper import Child, EndStatus, Reaper

_TERMINAL_ROWS, _TERMINAL_COLUMNS = 24, 80


@dataclass(frozen=True, slots=True, kw_only=True)
class MainProgram:
    """What the main process runs."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    working_directory: str
    terminal: bool


class MainProcess:
    """A started main process. Make one with :meth:`start`."""

    def __init__(self, *, child: Child, terminal: bool, output: OutputBuffer, drains: tuple[OutputDrain, ...]) -> None:
        self._child = child
        self._drains = drains
        self.terminal = terminal
        self.output = output

    @classmethod
    async def start(cls, program: MainProgram, *, ruleset_fd: int, reaper: Reaper) -> MainProcess:
        """Start *program*, confined by the ruleset.

        Without a terminal its stdin is empty and its stdout and stderr are told apart; with one, all three are the
        terminal.

        Raises:
            LaunchError: It could not be started; the text says why.
        """
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            try:
                standard, sources = _open_terminal(theirs, ours) if program.terminal else _open_pipes(theirs, ours)
            except OSError as error:
                raise LaunchError(f"cannot open the main process's streams: {cause_of(error)}") from error
            child = await launch(
                Program(
                    arguments=program.arguments,
                    environment=program.environment,
                    working_directory=program.working_directory,
                    ruleset_fd=ruleset_fd,
                    standard_fds=standard,
                    terminal=program.terminal,
                ),
                reaper,
            )
            ours.pop_all()
        output = OutputBuffer()
        drains = tuple(OutputDrain(fd, channel, output) for channel, fd in sources)
        return cls(child=child, terminal=program.terminal, output=output, drains=drains)

    @property
    def pid(self) -> int:
        """Its pid, which is also its session and process group."""
        return self._child.pid

    @property
    def status(self) -> EndStatus | None:
        """How it ended; None while it lives."""
        return self._child.status

    async def wait(self) -> EndStatus:
        """How it ended, as soon as it did; its output up to then has been taken."""
        status = await self._child.wait()
        # Others may hold the streams open for long; what the process itself wrote is in them already.
        for drain in self._drains:
            drain.take_what_is_there()
        return status

    def signal(self, number: signal.Signals) -> bool:
        """Signal its process group. Returns False when it has ended."""
        if self._child.status is not None:
            return False
        try:
            os.killpg(self._child.pid, number)
        except ProcessLookupError:
            return False
        return True

    def close(self) -> None:
        """Let go of its streams; idempotent."""
        for drain in self._drains:
            drain.close()


_Sources = tuple[tuple[OutputChannel, int], ...]


def _open_pipes(theirs: contextlib.ExitStack, ours: contextlib.ExitStack) -> tuple[tuple[int, int, int], _Sources]:
    stdin = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    theirs.callback(os.close, stdin)
    writers, sources = [], []
    for channel in OutputChannel:
        reading, writing = os.pipe2(os.O_CLOEXEC)
        ours.callback(os.close, reading)
        theirs.callback(os.close, writing)
        os.set_blocking(reading, False)
        writers.append(writing)
        sources.append((channel, reading))
    return (stdin, writers[0], writers[1]), tuple(sources)


def _open_terminal(theirs: contextlib.ExitStack, ours: contextlib.ExitStack) -> tuple[tuple[int, int, int], _Sources]:
    import termios

    ours_fd, theirs_fd = os.openpty()
    ours.callback(os.close, ours_fd)
    theirs.callback(os.close, theirs_fd)
    termios.tcsetwinsize(ours_fd, (_TERMINAL_ROWS, _TERMINAL_COLUMNS))
    os.set_blocking(ours_fd, False)
    return (theirs_fd, theirs_fd, theirs_fd), ((OutputChannel.STDOUT, ours_fd),)


async def end_after(seconds: float, process: MainProcess, *, grace_seconds: float) -> bool:
    """End *process* by SIGTERM, then SIGKILL, when it still runs after *seconds*. Returns whether it did."""
    try:
        async with asyncio.timeout(seconds):
            await process.wait()
    except TimeoutError:
        pass
    else:
        return False
    for number, patience in ((signal.SIGTERM, grace_seconds), (signal.SIGKILL, None)):
        process.signal(number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await process.wait()
                break
    return True
