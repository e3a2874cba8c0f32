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

    def __init__(self, count: int) -> None:
        line = {"Type": "container", "Action": "die", "Actor": {"ID": "c", "Attributes": {}}, "timeNano": 1}
        self._data = (json.dumps(line).encode() + b"\n") * count
        self._shut = threading.Event()

    def read1(self, size: int) -> bytes:
        chunk, self._data = self._data[:size], self._data[size:]
        if not chunk:
            self._shut.wait(10)
        return chunk

    def shutdown(self) -> None:
        self._shut.set()


class Answer:
    def __init__(self, count: int) -> None:
        self.raw = Raw(count)


def stream_of(count: int) -> DockerEventStream:
    return DockerEventStream(cast("Any", Answer(count)), on_close=lambda _: None)


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
