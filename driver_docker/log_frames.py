"""The engine's frames around a container's log, in chunks that are cut anywhere. Pure.

A container without a terminal sends its log as frames (one byte of stream number, three of zero, four of length), one
with a terminal sends raw bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

TERMINAL: Final = 0
"""Number of the stream of a container with a terminal."""
STDERR: Final = 2
"""Number of standard error."""

_HEADER_BYTES: Final = 8
_MAX_STREAM: Final = 3


class LogFrames:
    """Takes the frames off. Never raises on what a container wrote.

    Args:
        tty: Whether the container has a terminal (its log is raw) or not (its log is framed).
    """

    def __init__(self, *, tty: bool) -> None:
        self._tty = tty
        self._header = bytearray()
        self._stream = TERMINAL
        self._payload_left = 0

    def split(self, chunk: bytes) -> Iterator[tuple[int, bytes]]:
        """The pieces of streams in the next bytes of the log, each with the number of its stream."""
        if self._tty:
            yield TERMINAL, chunk
            return
        view = memoryview(chunk)
        while view:
            if self._payload_left:
                part = view[: self._payload_left]
                self._payload_left -= len(part)
                view = view[len(part) :]
                yield self._stream, bytes(part)
                continue
            missing = _HEADER_BYTES - len(self._header)
            self._header += view[:missing]
            view = view[missing:]
            if len(self._header) == _HEADER_BYTES:
                if self._header[0] > _MAX_STREAM or any(self._header[1:4]):
                    # Not frames after all: given as it is rather than lost.
                    self._tty = True
                    yield TERMINAL, bytes(self._header) + bytes(view)
                    return
                self._stream = self._header[0]
                self._payload_left = int.from_bytes(self._header[4:], "big")
                self._header.clear()


class LineSearch:
    """Looks for one line on the standard error of a container without a terminal.

    Args:
        line: The whole line, without its end.
    """

    def __init__(self, line: str) -> None:
        self._wanted = line.encode()
        self._frames = LogFrames(tty=False)
        self._open = bytearray()

    def feed(self, chunk: bytes) -> bool:
        """Take the next bytes of the log, cut anywhere; whether the line is among what came so far."""
        return any(self._has_line(part) for stream, part in self._frames.split(chunk) if stream == STDERR)

    def _has_line(self, part: bytes) -> bool:
        *whole, rest = part.split(b"\n")
        for piece in whole:
            self._extend(piece)
            found = self._open == self._wanted
            self._open.clear()
            if found:
                return True
        self._extend(rest)
        return False

    def _extend(self, piece: bytes) -> None:
        # One byte more than the line has is enough to tell that it is another one.
        self._open += piece[: len(self._wanted) + 1 - len(self._open)]
