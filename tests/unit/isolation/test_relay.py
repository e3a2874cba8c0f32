"""Two transports joined: bytes both ways, backpressure, and an end that releases everything."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from openshell.isolation import relay as relay_module
from openshell.isolation.relay import WRITE_HIGH_WATER_BYTES, Relay


class Ends:
    """A relay between two socket pairs; the test holds the far ends."""

    def __init__(self) -> None:
        self.closed_calls = 0
        self.released_calls = 0
        self.relay = Relay(on_closed=self._closed, on_released=self._released)
        self.outer, self._outer_near = socket.socketpair()
        self.inner, self._inner_near = socket.socketpair()
        for end in (self.outer, self.inner):
            end.setblocking(False)

    async def connect(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(lambda: self.relay.outer, self._outer_near)
        await loop.connect_accepted_socket(lambda: self.relay.inner, self._inner_near)

    def _closed(self) -> None:
        self.closed_calls += 1

    def _released(self) -> None:
        self.released_calls += 1


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    made = Ends()
    await made.connect()
    yield made
    made.relay.abort()
    async with asyncio.timeout(5):
        await made.relay.released.wait()
    made.outer.close()
    made.inner.close()


async def receive(end: socket.socket, size: int) -> bytes:
    data = b""
    async with asyncio.timeout(10):
        while len(data) < size:
            piece = await asyncio.get_running_loop().sock_recv(end, size - len(data))
            if not piece:
                break
            data += piece
    return data


async def test_bytes_flow_both_ways_once_joined(ends: Ends) -> None:
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(ends.outer, b"early")
    ends.relay.join()
    assert await receive(ends.inner, 5) == b"early"
    await loop.sock_sendall(ends.inner, b"answer")
    assert await receive(ends.outer, 6) == b"answer"


async def test_what_came_before_the_sides_were_joined_is_delivered(ends: Ends) -> None:
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(ends.outer, b"early request")
    await loop.sock_sendall(ends.inner, b"early answer")
    for _ in range(3):  # turns of the loop in which a side that reads would have read
        await asyncio.sleep(0)
    ends.relay.join()
    assert await receive(ends.inner, 13) == b"early request"
    assert await receive(ends.outer, 12) == b"early answer"


async def test_a_slow_reader_stops_the_writer(ends: Ends) -> None:
    ends.relay.join()
    loop = asyncio.get_running_loop()
    total = 64 * 1024 * 1024
    block = b"x" * 65536
    sent = 0
    sending = True

    async def send() -> None:
        nonlocal sent
        while sent < total:
            await loop.sock_sendall(ends.outer, block)
            sent += len(block)

    task = asyncio.create_task(send())
    # The sender has stopped once a whole pass over the loop moves nothing any more.
    while sending:
        before = sent
        for _ in range(200):
            await asyncio.sleep(0)
        sending = sent != before
    assert sent < 8 * WRITE_HIGH_WATER_BYTES
    received = 0
    while received < total:
        received += len(await receive(ends.inner, min(1 << 20, total - received)))
    await task
    assert received == total


async def test_what_is_held_is_delivered_before_the_end(ends: Ends) -> None:
    ends.relay.join()
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(ends.outer, b"y" * 150_000)
    ends.outer.close()
    assert len(await receive(ends.inner, 200_000)) == 150_000
    async with asyncio.timeout(5):
        await ends.relay.released.wait()
    assert (ends.closed_calls, ends.released_calls) == (1, 1)


async def test_a_reader_that_never_reads_cannot_hold_the_relay(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "DRAIN_SECONDS", 0.0)
    ends.relay.join()
    loop = asyncio.get_running_loop()
    sender = asyncio.create_task(loop.sock_sendall(ends.outer, b"z" * 4_000_000))
    for _ in range(200):
        await asyncio.sleep(0)
    sender.cancel()
    await asyncio.gather(sender, return_exceptions=True)
    ends.relay.finish()
    async with asyncio.timeout(5):
        await ends.relay.released.wait()


async def test_a_side_that_ended_alone_ends_the_other_when_joined(ends: Ends) -> None:
    ends.relay.outer.abort()
    async with asyncio.timeout(5):
        await ends.relay.closed.wait()
    assert not ends.relay.released.is_set()
    ends.relay.join()
    async with asyncio.timeout(5):
        await ends.relay.released.wait()
    assert await receive(ends.inner, 1) == b""


async def test_abort_ends_both_sides_at_once(ends: Ends) -> None:
    ends.relay.join()
    ends.relay.abort()
    ends.relay.abort()
    assert await receive(ends.outer, 1) == b""
    assert await receive(ends.inner, 1) == b""
