from __future__ import annotations

import asyncio
import json
import threading
from typing import Any, cast

import pytest

from driver_docker.engine import EngineUnreachableError
from driver_docker.engine_events import MAX_WAITING, DockerEventStream


class Raw:
    """An answer's body that comes at once and then stays open until it is shut."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._shut = threading.Event()

    def read1(self, size: int) -> bytes:
        chunk, self._data = self._data[:size], self._data[size:]
        if not chunk:
            self._shut.wait(10)
        return chunk

    def shutdown(self) -> None:
        self._shut.set()


class Answer:
    def __init__(self, data: bytes) -> None:
        self.raw = Raw(data)


LINE = (
    json.dumps({"Type": "container", "Action": "die", "Actor": {"ID": "c", "Attributes": {}}, "timeNano": 1}).encode()
    + b"\n"
)


def stream_of(count: int, *, then: bytes = b"") -> DockerEventStream:
    return DockerEventStream(cast("Any", Answer(LINE * count + then)), on_close=lambda _: None)


async def test_a_reader_that_falls_behind_is_told_so_and_reads_no_gap() -> None:
    stream = stream_of(MAX_WAITING + 10)
    async with asyncio.timeout(10):
        while not stream._fell_behind:  # noqa: ASYNC110 - its thread fills the queue
            await asyncio.sleep(0)
    seen = 0
    with pytest.raises(EngineUnreachableError, match="looked at again"):
        async for _ in stream:
            seen += 1
    assert seen == 0
    await stream.close()


async def test_a_reader_that_keeps_up_gets_every_event() -> None:
    stream = stream_of(50)
    events = aiter(stream)
    async with asyncio.timeout(10):
        actions = [(await anext(events)).action for _ in range(50)]
    assert set(actions) == {"die"}
    await stream.close()
    async with asyncio.timeout(10):
        assert [event async for event in events] == []


@pytest.mark.parametrize(
    "line",
    [
        b"null",
        b"[]",
        b"5",
        b"{",
        b"\xff",
        b'{"Actor": 5}',
        b'{"timeNano": 1e400}',
        b'{"timeNano": 999999999999999999999}',
    ],
)
async def test_an_event_that_cannot_be_understood_ends_the_stream_and_is_no_gap(line: bytes) -> None:
    stream = stream_of(2, then=line + b"\n" + LINE)
    seen = 0
    async with asyncio.timeout(10):
        with pytest.raises(EngineUnreachableError, match="cannot be understood") as ended:
            async for _ in stream:
                seen += 1
    assert seen == 2
    assert "EngineError" not in ended.value.message  # why, and not how that is called in here
    await stream.close()
