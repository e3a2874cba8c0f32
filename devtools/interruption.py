"""Signals that end ``./dev``: raised in the main thread so that everything it started is ended on the way out.

Standard library only: the bootstrap uses it before there is a virtual environment.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from devtools.errors import Interrupted

if TYPE_CHECKING:
    from types import FrameType

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _raise(number: int, _frame: FrameType | None) -> None:
    raise Interrupted(number)


def install() -> None:
    """Turn the ending signals into :class:`Interrupted`, those held back until now included."""
    for number in ENDING_SIGNALS:
        signal.signal(number, _raise)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)


def hold_back() -> None:
    """Keep the ending signals pending, also through an exec, until :func:`install` is called."""
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
