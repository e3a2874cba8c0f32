"""What can go wrong in ``./dev``, and with which exit code it ends."""

from __future__ import annotations

from typing import ClassVar


class DevError(Exception):
    """Root of everything that ``./dev`` reports as one message instead of a traceback."""

    exit_code: ClassVar[int] = 1


class PreconditionError(DevError):
    """The machine lacks something that ``./dev`` may not or cannot provide; the text says what to do."""

    exit_code: ClassVar[int] = 3


class StepFailedError(DevError):
    """A command of a step ended with an error; the text holds the end of its output."""


class EngineFailedError(DevError):
    """The private engine did not start, or ended on its own."""


class Interrupted(BaseException):
    """A signal asked ``./dev`` to end; raised in the main thread so that every context manager unwinds."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.signal_number = signal_number

    @property
    def exit_code(self) -> int:
        """The shell's convention for a death by signal."""
        return 128 + self.signal_number
