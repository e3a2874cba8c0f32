"""What a supervisor says about its own end: one structured line, the last on its standard error.

The supervisor writes it, the driver quotes its public half, a client reads it as part of a verdict. Import these names
from `openshell.verdicts`. Standard library only.
"""

from __future__ import annotations

import json
import unicodedata
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

MAX_WORDS_BYTES: Final = 512
"""Upper bound of public last words and of an engine's cause in UTF-8 bytes."""

MAX_PRIVATE_BYTES: Final = 2048
"""Upper bound of private last words in UTF-8 bytes."""

_MAX_LINE_CHARS: Final = 16 * 1024
_MARKER: Final = "openshell_last_words"


class Stage(StrEnum):
    """How far a supervisor had come, in the order of a launch."""

    BUILD = "build"
    ATTACH = "attach"
    CONFIRM = "confirm"
    START_AGENT = "start_agent"
    READINESS = "readiness"
    RUNNING = "running"
    UNKNOWN = "unknown"

    @classmethod
    def read(cls, text: str) -> Stage:
        """Return the member of a peer's text, `UNKNOWN` where this version does not know it."""
        return next((member for member in cls if member.value == text), cls.UNKNOWN)


class Category(StrEnum):
    """What kind of cause ended a supervisor, and so who can cure it."""

    POLICY_REFUSED = "policy_refused"
    CONFIGURATION = "configuration"
    INFRASTRUCTURE = "infrastructure"
    INCOMPATIBLE = "incompatible"
    ENTRYPOINT = "entrypoint"
    UNKNOWN = "unknown"

    @classmethod
    def read(cls, text: str) -> Category:
        """Return the member of a peer's text, `UNKNOWN` where this version does not know it."""
        return next((member for member in cls if member.value == text), cls.UNKNOWN)


def clean_text(text: str, *, max_bytes: int) -> str:
    """Make text from outside fit for a status, a condition or a terminal.

    Control, format, surrogate and private-use characters and line ends become spaces, runs of white space become one
    space, and the result is cut to a bound, marked with an ellipsis where it was cut.

    Args:
        text: Any text.
        max_bytes: Upper bound of the result in UTF-8 bytes, at least 3.
    """
    # Bounded before it is looked at: a megabyte of input costs no more than what can be kept.
    shown = "".join(" " if unicodedata.category(char)[0] in "CZ" else char for char in text[: max_bytes * 4])
    clean = " ".join(shown.split())
    raw = clean.encode()
    if not raw:
        return ""
    if len(raw) <= max_bytes and len(text) <= max_bytes * 4:
        return clean
    return raw[: max_bytes - 3].decode(errors="ignore").rstrip() + "…"


@dataclass(frozen=True, slots=True, kw_only=True)
class LastWords:
    """What a supervisor says about its own end, as the last line of its standard error."""

    stage: Stage
    """How far it had come."""
    category: Category
    """What kind of cause it was."""
    public: str
    """Text that may be shown to the owner of the sandbox; cleaned and at most 512 bytes."""
    private: str = field(default="", repr=False)
    """Text for the operator only; cleaned and at most 2 KiB."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "public", clean_text(self.public, max_bytes=MAX_WORDS_BYTES))
        object.__setattr__(self, "private", clean_text(self.private, max_bytes=MAX_PRIVATE_BYTES))

    def to_line(self) -> str:
        """Return the words as one line of ASCII JSON, without a line end."""
        fields = {
            _MARKER: 1,
            "stage": self.stage.value,
            "category": self.category.value,
            "public": self.public,
            "private": self.private,
        }
        return json.dumps(fields, separators=(",", ":"))

    @classmethod
    def find_in(cls, tail: str) -> LastWords | None:
        """Return the words in the last line of a log that holds any, or None.

        Only pass the standard error of the supervisor container of the generation in question: a line that the
        workload can write proves nothing. Lines that merely look like words are skipped.

        Args:
            tail: The end of a log.
        """
        for line in reversed(tail.splitlines()):
            if _MARKER in line and len(line) <= _MAX_LINE_CHARS:
                words = cls._from_line(line)
                if words is not None:
                    return words
        return None

    @classmethod
    def _from_line(cls, line: str) -> LastWords | None:
        try:
            found: object = json.loads(line)
        except (ValueError, RecursionError):
            return None
        if not isinstance(found, dict):
            return None
        version = found.get(_MARKER)
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            return None
        text = {key: value for key, value in found.items() if isinstance(value, str)}
        return cls(
            stage=Stage.read(text.get("stage", "")),
            category=Category.read(text.get("category", "")),
            public=text.get("public", ""),
            private=text.get("private", ""),
        )
