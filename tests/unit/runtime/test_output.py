from __future__ import annotations

import asyncio
import os

from hypothesis import given
from hypothesis import strategies as st

from sandbox_runtime.output import OutputBuffer, OutputChannel, OutputDrain


@given(st.lists(st.binary(min_size=1, max_size=20)), st.integers(1, 60))
def test_the_newest_output_is_kept_in_order_and_within_the_limit(pieces: list[bytes], limit: int) -> None:
    buffer = OutputBuffer(limit_bytes=limit)
    for data in pieces:
        buffer.append(OutputChannel.STDOUT, data)
    kept = buffer.since(0)
    assert [piece.data for piece in kept] == pieces[len(pieces) - len(kept) :]
    assert [piece.sequence for piece in kept] == list(range(buffer.first_sequence, buffer.next_sequence))
    assert buffer.next_sequence == len(pieces)
    assert sum(len(piece.data) for piece in kept) <= limit or len(kept) == 1
    assert buffer.truncated is (len(kept) < len(pieces))


def test_reading_goes_on_where_it_stopped() -> None:
    buffer = OutputBuffer()
    buffer.append(OutputChannel.STDOUT, b"one")
    seen = buffer.next_sequence
    buffer.append(OutputChannel.STDERR, b"two")
    assert [(piece.channel, piece.data) for piece in buffer.since(seen)] == [(OutputChannel.STDERR, b"two")]


async def test_a_drain_takes_everything_until_the_writer_is_gone() -> None:
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    buffer = OutputBuffer()
    drain = OutputDrain(reading, OutputChannel.STDOUT, buffer)
    os.write(writing, b"first")
    drain.take_what_is_there()
    assert [piece.data for piece in buffer.since(0)] == [b"first"]
    os.write(writing, b"last")
    os.close(writing)
    drain.close()
    drain.close()
    assert [piece.data for piece in buffer.since(0)] == [b"first", b"last"]
    await asyncio.sleep(0)
