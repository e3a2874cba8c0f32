"""What libraries say through :mod:`logging`, as lines of the runtime's own log."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sandbox_runtime.logs import Log

_EXTRAS = ("finding", "severity", "confidence")


class LoggingBridge(logging.Handler):
    """Passes records on; an exception is told by its type and text, without a traceback of values."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        try:
            event = record.getMessage()
        except (TypeError, ValueError):
            event = str(record.msg)
        facts: dict[str, object] = {"logger": record.name}
        facts |= {name: getattr(record, name) for name in _EXTRAS if hasattr(record, name)}
        if record.exc_info and record.exc_info[1] is not None:
            facts |= {"error": type(record.exc_info[1]).__name__, "detail": str(record.exc_info[1])}
        if record.levelno >= logging.ERROR:
            self._log.failure(event, **facts)
        elif record.levelno >= logging.WARNING:
            self._log.warning(event, **facts)
        elif record.levelno >= logging.INFO:
            self._log.info(event, **facts)
        else:
            self._log.debug(event, **facts)


def take_over_logging(log: Log) -> None:
    """Send every record of this process to *log*."""
    root = logging.getLogger()
    root.handlers[:] = [LoggingBridge(log)]
    root.setLevel(int(log.level))
    # At debug level grpc says several lines a call that tell nobody anything.
    logging.getLogger("grpc").setLevel(logging.WARNING)
