"""Two byte transports joined into one, with backpressure both ways and a bounded end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

WRITE_HIGH_WATER_BYTES = 256 * 1024
"""Bytes that one side may hold for a slow reader before the other side stops reading."""
DRAIN_SECONDS = 2.0
"""How long one side may take to deliver what is left once the other side is gone."""


class RelaySide(asyncio.Protocol):
    """One side of a relay: what arrives here is written to the other side.

    Reading starts when both sides are joined. When a side ends, the other one delivers what it still holds, for at most
    two seconds, and ends too. Nothing outlives the two transports.

    Args:
        on_lost: called once, when this side's transport is gone and before its socket is closed.
    """

    def __init__(self, on_lost: Callable[[], None]) -> None:
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._other: RelaySide | None = None
        self._write: Callable[[bytes], None] | None = None
        self._drain_timer: asyncio.TimerHandle | None = None
        self._lost = False

    @staticmethod
    def join(one: RelaySide, two: RelaySide) -> None:
        """Let bytes flow between two connected sides."""
        one._meet(two)
        two._meet(one)
        for side in (one, two):
            if side._transport is not None and not side._lost:
                side._transport.resume_reading()
        # A side that ended while it was alone could not tell the other one.
        if one._lost or two._lost:
            one.finish()
            two.finish()

    def _meet(self, other: RelaySide) -> None:
        self._other = other
        self._write = None if other._transport is None else other._transport.write

    @property
    def transport(self) -> asyncio.Transport | None:
        """The transport, once connected."""
        return self._transport

    def abort(self) -> None:
        """End this side at once, dropping what it holds."""
        if self._transport is not None:
            self._transport.abort()

    def finish(self) -> None:
        """End this side after what it holds is delivered, or after two seconds."""
        if self._transport is None or self._lost:
            return
        self._transport.close()
        if self._drain_timer is None:
            self._drain_timer = asyncio.get_running_loop().call_later(DRAIN_SECONDS, self.abort)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Hold reading until the other side is there."""
        if not isinstance(transport, asyncio.Transport):
            raise TypeError("a relay needs a stream transport")
        self._transport = transport
        transport.set_write_buffer_limits(high=WRITE_HIGH_WATER_BYTES)
        transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        """Pass bytes on."""
        if self._write is not None:
            self._write(data)

    def eof_received(self) -> bool:
        """Neither TLS nor HTTP/2 lives on half a connection: let the transport close."""
        return False

    def pause_writing(self) -> None:
        """The peer of this side reads too slowly: stop taking bytes from the other side."""
        other = self._other
        if other is not None and other._transport is not None and not other._transport.is_closing():
            other._transport.pause_reading()

    def resume_writing(self) -> None:
        """The peer caught up."""
        other = self._other
        if other is not None and other._transport is not None and not other._transport.is_closing():
            other._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the other side too, and report once."""
        self._lost = True
        if self._drain_timer is not None:
            self._drain_timer.cancel()
            self._drain_timer = None
        other, self._other, self._write = self._other, None, None
        if other is not None:
            other._write = None
            other.finish()
        self._on_lost()
