"""Two byte transports joined into one, with backpressure both ways and a bounded end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

WRITE_HIGH_WATER_BYTES = 256 * 1024
"""Bytes that one side may hold for a slow reader before the other side stops reading."""
DRAIN_SECONDS = 2.0
"""How long one side may take to deliver what is left once the other side is gone."""


class Relay:
    """An outer and an inner transport, one connection to whoever looks at it.

    Give :attr:`outer` and :attr:`inner` to the loop as protocols, then :meth:`join` them. When one ends, the other
    delivers what it still holds, for at most two seconds, and ends too. Nothing outlives the two transports.

    Attributes:
        closed: set when the first of the two is gone: the connection is over.
        released: set when both are gone and nothing is held any more.
    """

    def __init__(
        self, *, on_closed: Callable[[], None] | None = None, on_released: Callable[[], None] | None = None
    ) -> None:
        """Prepare a relay.

        Args:
            on_closed: called once with ``closed``, before the socket of the ended side is closed.
            on_released: called with ``released``.
        """
        self.closed = asyncio.Event()
        self.released = asyncio.Event()
        self.outer = RelaySide(self)
        self.inner = RelaySide(self)
        self._on_closed = on_closed
        self._on_released = on_released
        self._open = 0

    def join(self) -> None:
        """Let bytes flow between the two connected sides."""
        self.outer.meet(self.inner)
        self.inner.meet(self.outer)
        if self.closed.is_set():
            # A side that ended while it was alone could not tell the other one.
            self.finish()
        else:
            self.outer.resume_reading()
            self.inner.resume_reading()

    def finish(self) -> None:
        """End both sides after what they hold is delivered, or after two seconds; idempotent."""
        self.outer.finish()
        self.inner.finish()

    def abort(self) -> None:
        """End both sides at once, dropping what they hold; idempotent."""
        self.outer.abort()
        self.inner.abort()

    def opened(self) -> None:
        """A side is connected; called by the sides."""
        self._open += 1
        self.released.clear()

    def lost(self) -> None:
        """A side is gone; called by the sides."""
        self._open -= 1
        if not self.closed.is_set():
            self.closed.set()
            if self._on_closed is not None:
                self._on_closed()
        if self._open == 0:
            self.released.set()
            if self._on_released is not None:
                self._on_released()


class RelaySide(asyncio.Protocol):
    """One side of a relay: what arrives here is written to the other side. Reading starts when both are joined."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._transport: asyncio.Transport | None = None
        self._other: RelaySide | None = None
        self._drain_timer: asyncio.TimerHandle | None = None
        self._early: list[bytes] | None = []

    def meet(self, other: RelaySide) -> None:
        """Write to the other side from here on, beginning with what has arrived already."""
        self._other = other
        early, self._early = self._early, None
        for data in early or ():
            other.write(data)

    def part(self) -> None:
        """The other side is gone: deliver what is left and end."""
        self._other = None
        self.finish()

    def write(self, data: bytes) -> None:
        """Send bytes to this side's peer."""
        if self._transport is not None:
            self._transport.write(data)

    def pause_reading(self) -> None:
        """Take no more bytes from this side's peer."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Take bytes from this side's peer again."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def abort(self) -> None:
        """End this side at once, dropping what it holds."""
        if self._transport is not None:
            self._transport.abort()

    def finish(self) -> None:
        """End this side after what it holds is delivered, or after two seconds."""
        if self._transport is not None and self._drain_timer is None:
            self._transport.close()
            self._drain_timer = asyncio.get_running_loop().call_later(DRAIN_SECONDS, self.abort)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Hold reading until the other side is there."""
        if not isinstance(transport, asyncio.Transport):
            raise TypeError("a relay needs a stream transport")
        self._transport = transport
        transport.set_write_buffer_limits(high=WRITE_HIGH_WATER_BYTES)
        transport.pause_reading()
        self._relay.opened()

    def data_received(self, data: bytes) -> None:
        """Pass bytes on."""
        if self._other is not None:
            self._other.write(data)
        elif self._early is not None and self._transport is not None:
            # Early releases of Python 3.11 begin to read after `connection_made` although it paused them, and take
            # another pause for done. What they read is kept, and resuming first makes the pause come true.
            self._early.append(data)
            self._transport.resume_reading()
            self._transport.pause_reading()

    def eof_received(self) -> bool:
        """Neither TLS nor HTTP/2 lives on half a connection: let the transport close."""
        return False

    def pause_writing(self) -> None:
        """This side's peer reads too slowly: take no more bytes from the other one."""
        if self._other is not None:
            self._other.pause_reading()

    def resume_writing(self) -> None:
        """This side's peer caught up."""
        if self._other is not None:
            self._other.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the other side too."""
        self._transport = None
        if self._drain_timer is not None:
            self._drain_timer.cancel()
        if self._other is not None:
            self._other.part()
        self._other = None
        self._relay.lost()
