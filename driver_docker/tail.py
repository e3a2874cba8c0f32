"""The end of a container's log: bytes from the engine to bounded, clean text without secrets. Pure.

`TailReader` takes the log in chunks of any size and keeps only what it may return, so a line of a megabyte costs no
more than one of sixteen KiB.

Last words are looked for in the standard error alone: what comes out of standard output or of a terminal may have been
written by anybody. Whether the container is the supervisor of the current generation is for the caller to know.
"""

from __future__ import annotations

import re
import unicodedata
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from driver_docker.log_frames import STDERR, TERMINAL, LogFrames
from openshell.verdicts import LastWords

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_LINES: Final = 80
"""Most lines of a tail (compute-driver contract 5.10)."""

MAX_BYTES: Final = 16 * 1024
"""Most UTF-8 bytes of a tail (compute-driver contract 5.10)."""

_MAX_RAW_LINE_BYTES: Final = 16 * 1024
_MAX_SHOWN_LINE_CHARS: Final = 2048
_WORDS_MARKER: Final = b'"openshell_last_words"'
_REDACTED: Final = "[redacted]"
_MIN_SECRET_CHARS: Final = 6

_ESCAPES: Final = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # control sequences: colours, cursor
    r"|(?:\x1b\]|\x9d)[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?"  # operating system commands: titles, links
    r"|\x1b[PX^_][^\x1b\n]*(?:\x1b\\)?"  # device control and other strings
    r"|\x1b[ -/]*[0-~]?"  # everything else that starts with an escape
)
_PRIVATE_KEY: Final = re.compile(
    r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----.*?(?:-----END [A-Z0-9 ]*PRIVATE KEY-----|\Z)", re.DOTALL
)
_PRIVATE_KEY_END: Final = re.compile(
    r"(?:^[ \t]*[A-Za-z0-9+/=]+[ \t]*\n)*+^.*-----END [A-Z0-9 ]*PRIVATE KEY-----", re.MULTILINE
)
_TOKEN: Final = re.compile(
    r"(?<![A-Za-z0-9_-])(?:"
    r"e(?:yJ|wo)[A-Za-z0-9_-]{10,}(?:\.[A-Za-z0-9_-]*){0,4}"  # a JWT or the beginning of one
    r"|[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}"  # three long parts, whatever they begin with
    r")"
)
_BEARER: Final = re.compile(r"\b(bearer|basic)(\s+|%20)(?!\[redacted\])[A-Za-z0-9._~+/=-]{6,}", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogTail:
    """The end of a log, fit to be kept in an owner-only record."""

    text: str
    """At most 80 lines and 16 KiB of UTF-8, without control characters, escapes and secrets."""
    truncated: bool
    """Whether something of what was read is missing from `text`."""
    last_words: LastWords | None = None
    """The last structured line on standard error, redacted; None where there is none."""


@dataclass(slots=True)
class _Line:
    kept: bytearray = field(default_factory=bytearray)
    cut: bool = False


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """Replace what looks like a credential, and the given values wherever they occur.

    Recognised are tokens of three dotted parts, credentials after ``Bearer`` or ``Basic``, and private keys in PEM,
    also where only a part of the key is in the text.

    Args:
        text: Any text.
        secrets: Values that must not appear; ones shorter than six characters are ignored, they would tear holes into
            ordinary words.
    """
    for secret in sorted(set(secrets), key=len, reverse=True):
        if len(secret) >= _MIN_SECRET_CHARS:
            text = text.replace(secret, _REDACTED)
    text = _PRIVATE_KEY.sub(_REDACTED, text)
    if "PRIVATE KEY-----" in text:
        text = _PRIVATE_KEY_END.sub(_REDACTED, text)
    text = _TOKEN.sub(_REDACTED, text)
    return _BEARER.sub(rf"\1\2{_REDACTED}", text)


def read_tail(
    raw: bytes, *, tty: bool, secrets: Iterable[str] = (), max_lines: int = MAX_LINES, max_bytes: int = MAX_BYTES
) -> LogTail:
    """Turn the body of a logs answer into a tail. See `TailReader`."""
    reader = TailReader(tty=tty, secrets=secrets, max_lines=max_lines, max_bytes=max_bytes)
    reader.feed(raw)
    return reader.finish()


class TailReader:
    """Reads a log in chunks and keeps its end. Never raises on what a container wrote.

    Args:
        tty: Whether the container has a terminal (its log is raw) or not (its log is framed).
        secrets: Values that must not appear in the result.
        max_lines: Most lines of the result.
        max_bytes: Most UTF-8 bytes of the result.
    """

    def __init__(
        self, *, tty: bool, secrets: Iterable[str] = (), max_lines: int = MAX_LINES, max_bytes: int = MAX_BYTES
    ) -> None:
        self._frames = LogFrames(tty=tty)
        self._secrets = tuple(secrets)
        self._max_lines = max_lines
        self._max_bytes = max_bytes
        self._open: dict[int, _Line] = {}
        self._lines: deque[bytes] = deque()
        self._kept_bytes = 0
        self._dropped = False
        self._words: LastWords | None = None

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes of the log, cut anywhere."""
        for stream, part in self._frames.split(chunk):
            self._take(stream, part)

    def finish(self) -> LogTail:
        """Return what was kept. A frame or a line that the log's end cut off counts as far as it came."""
        for stream in sorted(self._open):
            self._end_line(stream)
        text = _cleaned(b"\n".join(self._lines).decode("utf-8", "replace"))
        text, cut = self._bounded(redact(text, self._secrets))
        return LogTail(text=text, truncated=cut or self._dropped, last_words=self._last_words())

    def _take(self, stream: int, data: bytes) -> None:
        *whole, rest = data.split(b"\n")
        for piece in whole:
            self._extend(stream, piece)
            self._end_line(stream)
        if rest:
            self._extend(stream, rest)

    def _extend(self, stream: int, piece: bytes) -> None:
        # A frame's stream number is a peer's byte: whatever is not standard error shares one line buffer.
        line = self._open.setdefault(STDERR if stream == STDERR else TERMINAL, _Line())
        room = _MAX_RAW_LINE_BYTES - len(line.kept)
        line.kept += piece[:room]
        line.cut |= len(piece) > room

    def _end_line(self, stream: int) -> None:
        line = self._open.pop(STDERR if stream == STDERR else TERMINAL, None)
        if line is None:
            self._append(b"")
            return
        self._dropped |= line.cut
        if stream == STDERR and _WORDS_MARKER in line.kept:
            self._words = LastWords.find_in(line.kept.decode("utf-8", "replace")) or self._words
        self._append(bytes(line.kept).removesuffix(b"\r"))

    def _append(self, line: bytes) -> None:
        self._lines.append(line)
        self._kept_bytes += len(line) + 1
        # More than the result may hold, so that a key that starts before it is still seen as one.
        while len(self._lines) > 2 * self._max_lines or self._kept_bytes > 4 * self._max_bytes + _MAX_RAW_LINE_BYTES:
            self._kept_bytes -= len(self._lines.popleft()) + 1
            self._dropped = True

    def _bounded(self, text: str) -> tuple[str, bool]:
        lines = text.split("\n")
        while lines and not lines[-1]:
            lines.pop()
        kept: list[str] = []
        room = self._max_bytes
        for line in reversed(lines[-self._max_lines :]):
            shown = line if len(line) <= _MAX_SHOWN_LINE_CHARS else line[:_MAX_SHOWN_LINE_CHARS] + "…"
            room -= len(shown.encode()) + 1
            if room < 0:
                break
            kept.append(shown)
        result = "\n".join(reversed(kept))
        return result, len(kept) < len(lines) or any(len(line) > _MAX_SHOWN_LINE_CHARS for line in lines)

    def _last_words(self) -> LastWords | None:
        words = self._words
        if words is None:
            return None
        return LastWords(
            stage=words.stage,
            category=words.category,
            public=redact(words.public, self._secrets),
            private=redact(words.private, self._secrets),
        )


def _cleaned(text: str) -> str:
    text = _ESCAPES.sub("", text.replace("\r\n", "\n")).replace("\t", " ").replace("\r", " ")
    # Removed rather than replaced: a control character inside a secret must not hide it from redaction.
    return "".join(char for char in text if char == "\n" or char.isprintable() or unicodedata.category(char) == "Zs")
