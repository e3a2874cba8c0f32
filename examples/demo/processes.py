"""The gateway and the driver as a user would start them: two commands, ended by signal."""

from __future__ import annotations

import contextlib
import queue
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

START_TIMEOUT_SECONDS = 60.0
END_NOTICE_SECONDS = 1.0
"""How long a command that may be dying is given to have ended."""
STOP_TIMEOUT_SECONDS = 10.0

# Asks the kernel to end the command when the demo itself is killed, then becomes the command.
_WITH_PARENT = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execv(sys.argv[1], sys.argv[1:])"


class CommandError(RuntimeError):
    """A command did not start, or ended too early; the text holds its last lines."""


@dataclass(slots=True)
class Command:
    """A running command whose standard output is read line by line."""

    name: str
    process: subprocess.Popen[str]
    log_path: Path
    lines: queue.Queue[str | None] = field(default_factory=queue.Queue)
    on_end: Callable[[], None] = lambda: None
    """Called from another thread as soon as it has ended, however that went."""

    def expect(self, prefix: str) -> str:
        """Wait for a line that starts with ``prefix`` and return the rest of it.

        Raises:
            CommandError: The command ended or was silent for too long.
        """
        while True:
            try:
                line = self.lines.get(timeout=START_TIMEOUT_SECONDS)
            except queue.Empty:
                raise CommandError(
                    f"{self.name} said no {prefix!r} in {START_TIMEOUT_SECONDS:g} s{self._tail()}"
                ) from None
            if line is None:
                raise CommandError(f"{self.name} ended with code {self.process.wait()}{self._tail()}")
            if line.startswith(prefix):
                return line.removeprefix(prefix).strip()

    def raise_if_ended(self) -> None:
        """Say so where it has ended though nobody asked it to, or does within a moment.

        A command that dies closes its connections first, so a call may fail before the command counts as ended.

        Raises:
            CommandError: It has ended.
        """
        try:
            code = self.process.wait(END_NOTICE_SECONDS)
        except subprocess.TimeoutExpired:
            return
        raise CommandError(f"{self.name} ended with code {code}{self._tail()}")

    def _tail(self) -> str:
        lines = self.log_path.read_text("utf-8", errors="replace").splitlines()[-15:]
        return "".join(f"\n  {line}" for line in lines)


@contextlib.contextmanager
def command(
    name: str, arguments: Sequence[str], *, environment: Mapping[str, str], log_path: Path
) -> Iterator[Command]:
    """Run a command of this project until the block ends, then end it in order."""
    executable = Path(sys.executable).with_name(name)
    found = str(executable) if executable.is_file() else shutil.which(name)
    if found is None:
        raise CommandError(f"the command {name} is not installed beside {sys.executable}")
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _WITH_PARENT, found, *arguments],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,  # Ctrl-C reaches the demo alone, which then ends its commands in order
        )
    running = Command(name, process, log_path)
    reader = threading.Thread(target=_read, args=(running,), name=f"{name}-output")
    reader.start()
    try:
        yield running
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join()


def _read(running: Command) -> None:
    if running.process.stdout is not None:
        with running.process.stdout as output:
            for line in output:
                running.lines.put(line.rstrip("\n"))
    running.process.wait()
    running.lines.put(None)
    running.on_end()
