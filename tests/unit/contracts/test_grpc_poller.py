"""What the tests themselves rely on: grpc's polling thread is there before a test's own event loop."""

from __future__ import annotations

import threading

import grpc.aio


async def test_a_channel_starts_no_poller_of_its_own() -> None:
    before = set(threading.enumerate())
    async with grpc.aio.insecure_channel("unix:/nowhere"):
        assert set(threading.enumerate()) == before
