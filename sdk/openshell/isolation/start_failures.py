"""Why a program could not be started, in a closed vocabulary that runtime and supervisor share.

A runtime ends its words with one of these phrases; after `NOT_IN_PATH` comes the search path in parentheses.
`WORKING_DIRECTORY` is never written, only recognised: in words that name the folder that cannot be entered. A
supervisor repeats the phrase alone in what the owner of a sandbox reads, never the words around it, which are a
peer's and may quote anything.
"""

from __future__ import annotations

import re
from enum import StrEnum


class StartFailure(StrEnum):
    """What kept a program from starting."""

    NOT_FOUND = "no such file or directory"
    NOT_IN_PATH = "not found in PATH"
    NOT_EXECUTABLE = "not an executable file, or not for this user"
    NO_INTERPRETER = "the interpreter or loader that it names is not in the image"
    BAD_FORMAT = "neither a program for this machine nor a script with an interpreter line"
    NOT_ALLOWED = "the filesystem policy does not allow it, or its loader"
    WORKING_DIRECTORY = "its working directory cannot be entered"

    @classmethod
    def told_in(cls, words: str) -> StartFailure | None:
        """The failure that a runtime's words tell; nothing when they tell another."""
        found = _EXECUTE.search(words)
        if found is not None:
            return cls(found["cause"])
        return cls.WORKING_DIRECTORY if _WORKING_DIRECTORY.search(words) else None


_EXECUTE = re.compile(
    rf"\bcannot execute .*: (?P<cause>{'|'.join(re.escape(failure) for failure in StartFailure)})(?: \([^()]*\))?\Z",
    re.DOTALL,
)
_WORKING_DIRECTORY = re.compile(r"\bcannot enter the working directory /")
