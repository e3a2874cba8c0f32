"""Log lines of PID 1: one JSON object a line on stderr, by the standard library alone to keep the start fast."""

from __future__ import annotations

import json
import os
import sys
import time
from enum import IntEnum


class Level(IntEnum):
    """Severity of a line."""

    DEBUG = 10
    INFO = 20
    WARNING = 30
    ERROR = 40


class Log:
    """Writes lines at or above a level. A stderr that nobody takes any more is no reason to fail."""

    def __init__(self, level: Level = Level.INFO) -> None:
        self.level = level

    def debug(self, event: str, **facts: object) -> None:
        """Something for whoever develops the runtime."""
        self._write(Level.DEBUG, event, facts)

    def info(self, event: str, **facts: object) -> None:
        """Something that is as it should be."""
        self._write(Level.INFO, event, facts)

    def warning(self, event: str, **facts: object) -> None:
        """Something that the operator may want to change."""
        self._write(Level.WARNING, event, facts)

    def failure(self, event: str, **facts: object) -> None:
        """Something that failed."""
        self._write(Level.ERROR, event, facts)

    def _write(self, level: Level, event: str, facts: dict[str, object]) -> None:
        if level < self.level:
            return
        now = time.time()
        stamp = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(now))}.{int(now * 1000) % 1000:03d}Z"
        line = {"timestamp": stamp, "level": level.name.lower(), "event": event, **facts}
        try:
            sys.stderr.write(json.dumps(line, ensure_ascii=True, default=str) + "\n")
            sys.stderr.flush()
        except (OSError, ValueError):
            return


def level_from_environment() -> Level:
    """The level that OPENSHELL_LOG_LEVEL names (compute-driver contract 5.5); info for unknown names."""
    name = os.environ.get("OPENSHELL_LOG_LEVEL", "").upper()
    return {"TRACE": Level.DEBUG, "WARN": Level.WARNING}.get(name) or Level.__members__.get(name, Level.INFO)
