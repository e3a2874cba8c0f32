"""Signals as readable events that name their sender.

PID 1 shares its PID namespace and its uid with the agent, so the agent may try to stop it with ``kill -TERM 1``.
A Python signal handler cannot tell who sent a signal; a signalfd can: a sender outside the namespace has pid 0.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable

_RECORD_BYTES = 128  # sizeof(struct signalfd_siginfo)
_SIGSET_BYTES = 128  # sizeof(sigset_t) in glibc; musl's is as large
_RECORDS_A_READ = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedSignal:
    """One delivered signal."""

    number: signal.Signals
    sender_pid: int
    """Pid of the sender in this PID namespace; 0 when it was sent from outside."""


class SignalInbox:
    """Receives a set of signals through a signalfd on the event loop.

    Construct it on the main thread before any other thread exists: the signals are blocked here, and threads inherit
    the mask. Children must be spawned with an empty mask.
    """

    def __init__(self, signals: Iterable[signal.Signals]) -> None:
        wanted = frozenset(signals)
        self._handlers: dict[signal.Signals, Callable[[ReceivedSignal], None]] = {}
        signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
        mask = bytearray(_SIGSET_BYTES)
        for number in wanted:
            mask[(number - 1) // 8] |= 1 << ((number - 1) % 8)
        libc = ctypes.CDLL(None, use_errno=True)
        flags = os.O_CLOEXEC | os.O_NONBLOCK  # SFD_CLOEXEC and SFD_NONBLOCK have these values
        self._fd: int = libc.signalfd(-1, (ctypes.c_char * _SIGSET_BYTES).from_buffer(mask), flags)
        if self._fd < 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), "signalfd")

    def on(self, number: signal.Signals, handler: Callable[[ReceivedSignal], None]) -> None:
        """Call *handler* for every delivery of *number*; one handler a signal."""
        self._handlers[number] = handler

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Deliver on *loop* from now on; what arrived earlier is delivered first."""
        loop.add_reader(self._fd, self._drain)

    def close(self, loop: asyncio.AbstractEventLoop) -> None:
        """Stop delivering. The signals stay blocked."""
        loop.remove_reader(self._fd)
        os.close(self._fd)

    def _drain(self) -> None:
        try:
            data = os.read(self._fd, _RECORD_BYTES * _RECORDS_A_READ)
        except BlockingIOError:
            return
        for received in parse_records(data):
            handler = self._handlers.get(received.number)
            if handler is not None:
                handler(received)


def parse_records(data: bytes) -> tuple[ReceivedSignal, ...]:
    """The signals in the bytes of one read of a signalfd."""
    received = []
    for offset in range(0, len(data) - _RECORD_BYTES + 1, _RECORD_BYTES):
        number, _errno, _code, sender_pid = struct.unpack_from("=IiiI", data, offset)
        received.append(ReceivedSignal(number=signal.Signals(number), sender_pid=sender_pid))
    return tuple(received)
