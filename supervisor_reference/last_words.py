"""The supervisor's last words: one structured line, the very last on standard error.

Written for every exit code but 0, whatever the cause: a failure of a stage, a defect (the traceback goes into the
private half), SIGTERM and SIGINT. The driver reads only the last line and quotes only its public half.
"""

from __future__ import annotations

import logging
import sys
import traceback
from typing import TYPE_CHECKING

from openshell.verdicts import Category, LastWords, Stage

if TYPE_CHECKING:
    from typing import TextIO


def speak(words: LastWords, stream: TextIO | None = None) -> None:
    """Write the words as the last line, after every log record.

    Args:
        words: What to say.
        stream: Where to; standard error when None.
    """
    target = sys.stderr if stream is None else stream
    for handler in logging.getLogger().handlers:
        handler.flush()
    try:
        target.write(words.to_line() + "\n")
        target.flush()
    except (OSError, ValueError):
        # Nobody holds the other end any more; the exit code is all that is left to say.
        return


def words_of_defect(error: BaseException, stage: Stage) -> LastWords:
    """Return the words for an error that nobody foresaw.

    Args:
        error: The error; its text is private, since nobody checked what it quotes.
        stage: How far the supervisor had come.
    """
    lines = traceback.format_exception(error)
    return LastWords(
        stage=stage,
        category=Category.INFRASTRUCTURE,
        public=f"internal error of the supervisor ({type(error).__name__}); its log has the details",
        private="".join(lines[-4:]),
    )


def words_of_signal(name: str, stage: Stage) -> LastWords:
    """Return the words for an end by signal.

    Args:
        name: Name of the signal, for example ``SIGTERM``.
        stage: How far the supervisor had come.
    """
    return LastWords(stage=stage, category=Category.INFRASTRUCTURE, public=f"ended by {name} from outside")
