"""Log records as JSON lines on standard error.

The standard library's logging is enough here and starts in a tenth of the time that a structured-logging library needs,
which every sandbox would pay on its way to readiness.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from openshell.verdicts import clean_text

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TextIO

_MAX_EVENT_BYTES: Final = 4096
_LEVELS: Final[dict[str, int]] = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


class JsonLines(logging.Formatter):
    """One JSON object a record; the keys of ``facts`` stand beside the event."""

    def __init__(self, context: Mapping[str, str]) -> None:
        super().__init__()
        self._context = dict(context)

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of ASCII JSON."""
        fields: dict[str, object] = {
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": clean_text(record.getMessage(), max_bytes=_MAX_EVENT_BYTES),
            **self._context,
        }
        facts = getattr(record, "facts", None)
        if isinstance(facts, dict):
            fields.update(facts)
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, separators=(",", ":"), default=str)


def configure(level: str, *, context: Mapping[str, str], stream: TextIO | None = None) -> None:
    """Send every log record to standard error.

    Args:
        level: ``trace``, ``debug``, ``info``, ``warn`` or ``error``; anything else means ``info``.
        context: Facts that every line carries.
        stream: Where to; standard error when None.
    """
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonLines(context))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(_LEVELS.get(level.strip().lower(), logging.INFO))
