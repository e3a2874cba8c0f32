"""What a process wrote, as much of it as is kept.

A process must never block because nobody reads: its output is always taken, and the oldest is dropped.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from dataclasses import dataclass
from enum import IntEnum

RETAINED_BYTES = 256 * 1024
"""How much of a process's output is kept."""
PIECE_BYTES = 65_536
"""Largest piece: one frame of process I/O (isolation contract 3.2)."""


class OutputChannel(IntEnum):
    """Channel numbers of process I/O frames (isolation contract 3.2)."""

    STDOUT = 1
    STDERR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Bytes that were read at once."""

    sequence: int
    channel: OutputChannel
    data: bytes


class OutputBuffer:
    """The newest pieces, numbered from 0, at most *limit_bytes* of them."""

    def __init__(self, limit_bytes: int = RETAINED_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._pieces: deque[Piece] = deque()
        self._held_bytes = 0
        self._next = 0

    @property
    def first_sequence(self) -> int:
        """Number of the oldest piece that is kept; the next number when none is."""
        return self._pieces[0].sequence if self._pieces else self._next

    @property
    def next_sequence(self) -> int:
        """Number that the next piece will get."""
        return self._next

    @property
    def truncated(self) -> bool:
        """Whether anything was dropped."""
        return self.first_sequence > 0

    def append(self, channel: OutputChannel, data: bytes) -> None:
        """Keep *data*, and drop the oldest pieces beyond the limit; the newest is always kept."""
        self._pieces.append(Piece(sequence=self._next, channel=channel, data=data))
        self._next += 1
        self._held_bytes += len(data)
        while self._held_bytes > self._limit_bytes and len(self._pieces) > 1:
            self._held_bytes -= len(self._pieces.popleft().data)

    def since(self, sequence: int) -> tuple[Piece, ...]:
        """The kept pieces from *sequence* on."""
        return tuple(piece for piece in self._pieces if piece.sequence >= sequence)


class OutputDrain:
    """Moves one descriptor's bytes into a buffer until the last writer has closed its end.

    Args:
        fd: A non-blocking descriptor; owned from here on.
        channel: Which stream it is.
        into: Where the bytes go.
    """

    def __init__(self, fd: int, channel: OutputChannel, into: OutputBuffer) -> None:
        self._fd = fd
        self._channel = channel
        self._into = into
        self._loop = asyncio.get_running_loop()
        self._open = True
        self._loop.add_reader(fd, self._readable)

    def take_what_is_there(self) -> None:
        """Take what has been written so far, at most what the buffer keeps anyway."""
        for _ in range(RETAINED_BYTES // PIECE_BYTES):
            if not self._open or not self._take():
                return

    def close(self) -> None:
        """Take what is there now and stop; idempotent."""
        self.take_what_is_there()
        self._end()

    def _readable(self) -> None:
        self._take()

    def _take(self) -> bool:
        """Read once. Returns whether there may be more right now."""
        try:
            data = os.read(self._fd, PIECE_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""  # a terminal whose other side is gone says EIO
        if not data:
            self._end()
            return False
        self._into.append(self._channel, data)
        return True

    def _end(self) -> None:
        if self._open:
            self._open = False
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
