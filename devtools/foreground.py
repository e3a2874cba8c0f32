"""Running a command in the foreground: it owns the terminal, and signals reach it exactly once."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from typing import TYPE_CHECKING

from devtools import kernel
from devtools.console import say
from devtools.errors import Interrupted, PreconditionError
from devtools.interruption import ENDING_SIGNALS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_SI_KERNEL = 0x80
_CLEANUP_SECONDS = 90.0


def run_foreground(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command until it ends, with our stdin, stdout and stderr.

    A terminal's Ctrl-C reaches the command by itself, as part of the foreground process group; a signal sent to us
    alone is passed on. Either way the command gets time to clean up; after that, or at the third signal, it is killed.

    Returns:
        Its exit code; 128+n where signal n ended it.

    Raises:
        Interrupted: We were told to end; the command has ended already.
        PreconditionError: There is no such program.
    """
    path = shutil.which(command[0], path=environment.get("PATH"))
    if path is None:
        raise PreconditionError(f"cannot run {command[0]}: no such program")
    watched = {*ENDING_SIGNALS, signal.SIGCHLD}
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    try:
        process = subprocess.Popen(
            list(command),
            executable=path,
            env=dict(environment),
            preexec_fn=lambda: _prepare_child(previous),  # noqa: PLW1509 - we have no other thread
        )
        code, interrupted_by = _await(process.pid, watched)
        process.returncode = code
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
    if interrupted_by is not None:
        raise Interrupted(interrupted_by)
    return code


def _prepare_child(mask: set[signal.Signals | int]) -> None:
    """Between fork and exec: our mask of before, and a request to end where we are killed and cannot ask any more."""
    kernel.end_with_parent(signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _await(pid: int, watched: set[signal.Signals]) -> tuple[int, int | None]:
    first: int | None = None
    deadline: float | None = None
    signals_seen = 0
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended == pid:
            pending = signal.sigtimedwait(set(ENDING_SIGNALS), 0)
            code = os.waitstatus_to_exitcode(status)
            return (128 - code if code < 0 else code), first or (pending.si_signo if pending is not None else None)
        remaining = 3600.0 if deadline is None else deadline - time.monotonic()
        received = signal.sigtimedwait(watched, max(0.0, remaining))
        if received is not None and received.si_signo == signal.SIGCHLD:
            continue
        if received is None:
            if deadline is not None:
                say(f"it did not end within {_CLEANUP_SECONDS:.0f} s; killing it")
                os.kill(pid, signal.SIGKILL)
                deadline = time.monotonic() + 3600.0
            continue
        signals_seen += 1
        first = first or received.si_signo
        if deadline is None:
            say("interrupted; waiting for it to clean up (twice more ends it at once)")
            deadline = time.monotonic() + _CLEANUP_SECONDS
        if signals_seen >= 3:
            os.kill(pid, signal.SIGKILL)
        elif received.si_code != _SI_KERNEL:
            os.kill(pid, received.si_signo)
