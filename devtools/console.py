"""What ``./dev`` tells: one line a step on stderr, so that stdout stays the caller's.

Standard library only: the bootstrap uses it before there is a virtual environment.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from devtools import kernel
from devtools.errors import Interrupted, StepFailedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_QUIET_INTERVAL_SECONDS = 20.0
_WORTH_TELLING_SECONDS = 3.0
_TAIL_BYTES = 4000
_CLEAR_LINE = "\r\x1b[K"


def say(text: str) -> None:
    """Write one line about a step."""
    print(f"dev: {text}", file=sys.stderr, flush=True)


class Progress:
    """Tells that a long step is still at work: a rewritten line on a terminal, else a line now and then."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._begun = time.monotonic()
        self._told = self._begun
        self._terminal = sys.stderr.isatty()
        if not self._terminal:
            say(f"{title} …")

    def tick(self, detail: str = "") -> None:
        """Show the elapsed time, where it is time to."""
        now = time.monotonic()
        text = f"dev: {self._title} … {now - self._begun:.0f} s{' ' if detail else ''}{detail}"
        if self._terminal:
            print(f"{_CLEAR_LINE}{text}", end="", file=sys.stderr, flush=True)
        elif now - self._told >= _QUIET_INTERVAL_SECONDS:
            self._told = now
            print(text, file=sys.stderr, flush=True)

    def end(self, outcome: str = "done") -> None:
        """Say how the step ended and how long it took."""
        seconds = time.monotonic() - self._begun
        if self._terminal:
            print(_CLEAR_LINE, end="", file=sys.stderr)
        if self._terminal or outcome != "done" or seconds >= _WORTH_TELLING_SECONDS:
            say(f"{self._title}: {outcome} in {seconds:.1f} s")


def tail_of(path: Path) -> str:
    """The last lines of a log, for an error text."""
    try:
        data = path.read_bytes()[-_TAIL_BYTES:]
    except OSError:
        return ""
    return "\n".join(data.decode("utf-8", "replace").strip().splitlines()[-25:])


def run_step(
    command: Sequence[str],
    *,
    title: str,
    log: Path,
    environment: Mapping[str, str] | None = None,
    interruptible: bool = True,
    quiet: bool = False,
) -> None:
    """Run one command, output to ``log``, telling progress.

    Args:
        command: Program and arguments.
        title: What the step does, in a few words.
        log: Where its output goes; overwritten.
        environment: The whole environment of the command; ours when ``None``.
        interruptible: Whether a signal ends the command. Where it would leave the machine half changed, the command is
            left to finish first, and does not see the terminal's Ctrl-C.
        quiet: Say nothing unless the command fails.

    Raises:
        StepFailedError: The command could not be run or ended with an error.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    progress = None if quiet else Progress(title)
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=None if environment is None else dict(environment),
                start_new_session=not interruptible,
                # Where we are killed and cannot ask any more: else it works on beside the next run, in the same folder.
                preexec_fn=_end_with_us if interruptible else None,  # noqa: PLW1509 - the bootstrap has one thread
            )
        except OSError as error:
            raise StepFailedError(f"{title}: cannot run {command[0]}: {error.strerror}") from error
        try:
            _await(process, progress)
        except Interrupted:
            if interruptible:
                process.terminate()
            else:
                say(f"{title}: letting it finish first, since stopping half way would leave the machine half changed")
            process.wait()
            raise
        except BaseException:
            process.kill()
            process.wait()
            raise
    if process.returncode != 0:
        if progress is not None:
            progress.end(f"failed (exit {process.returncode})")
        raise StepFailedError(f"{title} failed: `{' '.join(command[:4])} …` exit {process.returncode}\n{tail_of(log)}")
    if progress is not None:
        progress.end()


def _end_with_us() -> None:
    kernel.end_with_parent(signal.SIGTERM)


def _await(process: subprocess.Popen[bytes], progress: Progress | None) -> None:
    while True:
        try:
            process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            if progress is not None:
                progress.tick()
        else:
            return
