"""The command line of the control supervisor.

The process is PID 1 of its container, so it answers SIGTERM from its first line on: nothing is imported before the
handler stands.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from types import FrameType


def main(arguments: list[str]) -> NoReturn:
    """Run a command and leave the process with its exit code.

    Args:
        arguments: The command line without the program's name: ``health --socket PATH``, else the supervisor's flags.
    """
    if arguments[:1] == ["health"]:
        from supervisor_reference.probe import probe

        _leave(probe(arguments[1:]))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end_before_start)
    from supervisor_reference.process import run_process

    _leave(run_process(arguments, os.environ))


def _end_before_start(number: int, frame: FrameType | None) -> NoReturn:
    """Answer a signal that came before there was anything to end in order."""
    del frame
    from openshell.verdicts import Stage
    from supervisor_reference.last_words import speak, words_of_signal

    speak(words_of_signal(signal.Signals(number).name, Stage.BUILD))
    _leave(128 + number)


def _leave(code: int) -> NoReturn:
    """End the process now: a name lookup that hangs in a thread must not hold up the exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
