from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from driver_docker.watch import HubClosedError, SlowReaderError, WatchHub
from openshell.status import StatusCode
from openshell.wire.compute.v1 import compute_driver_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


async def nothing() -> list[int]:
    return []


async def test_every_reader_gets_every_event_in_order() -> None:
    hub: WatchHub[int] = WatchHub()
    with hub.subscribe() as one, hub.subscribe() as other:
        for number in range(100):
            hub.publish(number)
        for reader in (one, other):
            assert [await anext(reader) for _ in range(100)] == list(range(100))


async def test_a_waiting_reader_is_woken_by_an_event() -> None:
    hub: WatchHub[str] = WatchHub()
    with hub.subscribe() as reader:
        waiting = asyncio.create_task(reader.__anext__())
        await asyncio.sleep(0)
        assert not waiting.done()
        hub.publish("now")
        assert await waiting == "now"


async def test_what_happens_while_the_snapshot_is_read_is_delivered_after_it() -> None:
    hub: WatchHub[str] = WatchHub()
    seen: list[str] = []
    done = asyncio.Event()

    async def snapshot() -> list[str]:
        hub.publish("during")
        return ["snapshot 1", "snapshot 2"]

    async def write(event: str) -> None:
        seen.append(event)
        if event == "snapshot 2":
            hub.publish("after")
        if event == "after":
            done.set()

    with hub.subscribe() as reader:
        task = asyncio.create_task(reader.deliver(snapshot, write))
        await done.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert seen == ["snapshot 1", "snapshot 2", "during", "after"]


async def test_a_reader_that_falls_behind_is_ended_without_a_gap() -> None:
    hub: WatchHub[int] = WatchHub(capacity=3)
    with hub.subscribe() as slow, hub.subscribe() as quick:
        for number in range(4):
            hub.publish(number)
            assert await anext(quick) == number
        with pytest.raises(SlowReaderError) as caught:
            await anext(slow)
        assert caught.value.status is StatusCode.RESOURCE_EXHAUSTED
        assert caught.value.retryable
        hub.publish(4)
        assert await anext(quick) == 4
        with pytest.raises(SlowReaderError):
            await anext(slow)
        assert (hub.reader_count, hub.cut_off_count) == (1, 1)


async def test_a_full_queue_that_was_not_overrun_is_delivered_whole() -> None:
    hub: WatchHub[int] = WatchHub(capacity=3)
    with hub.subscribe() as reader:
        for number in range(3):
            hub.publish(number)
        assert [await anext(reader) for _ in range(3)] == [0, 1, 2]


async def test_a_write_that_hangs_is_given_up_when_the_reader_falls_behind() -> None:
    hub: WatchHub[int] = WatchHub(capacity=2)
    blocked = asyncio.Event()

    async def write(_event: int) -> None:
        blocked.set()
        await asyncio.Event().wait()

    with hub.subscribe() as reader:
        task = asyncio.create_task(reader.deliver(nothing, write))
        hub.publish(0)
        await blocked.wait()
        for number in range(3):
            hub.publish(number)
        with pytest.raises(SlowReaderError):
            await task
    assert hub.reader_count == 0


async def test_an_error_of_the_snapshot_reaches_the_caller() -> None:
    hub: WatchHub[int] = WatchHub()

    async def snapshot() -> list[int]:
        raise LookupError("engine gone")

    with hub.subscribe() as reader, pytest.raises(LookupError, match="engine gone"):
        await reader.deliver(snapshot, lambda _: nothing())
    assert hub.reader_count == 0


async def test_closing_the_hub_ends_readers_as_unavailable_and_refuses_new_ones() -> None:
    hub: WatchHub[int] = WatchHub()
    reader = hub.subscribe()
    waiting = asyncio.create_task(reader.deliver(nothing, lambda _: nothing()))
    await asyncio.sleep(0)
    hub.close()
    hub.close()
    with pytest.raises(HubClosedError) as caught:
        await waiting
    assert caught.value.status is StatusCode.UNAVAILABLE
    with pytest.raises(HubClosedError):
        hub.subscribe()
    hub.publish(1)
    assert hub.reader_count == 0


async def test_a_capacity_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        WatchHub(capacity=0)


class Service:
    """The watch of a driver, and nothing else."""

    def __init__(self, hub: WatchHub[pb.WatchSandboxesEvent]) -> None:
        self.hub = hub
        self.handlers = 0
        self.idle = asyncio.Event()

    async def watch_sandboxes(
        self, request: pb.WatchSandboxesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        self.handlers += 1
        self.idle.clear()
        try:
            with self.hub.subscribe() as reader:
                try:
                    await reader.deliver(self.snapshot, context.write)
                except SlowReaderError as error:
                    await context.abort(error.status.grpc, error.public_message)
        finally:
            self.handlers -= 1
            if not self.handlers:
                self.idle.set()

    async def snapshot(self) -> list[pb.WatchSandboxesEvent]:
        return [event("replayed")]


def event(sandbox_id: str, *, padding_bytes: int = 0) -> pb.WatchSandboxesEvent:
    sandbox = pb.DriverSandbox(id=sandbox_id, name="x" * padding_bytes)
    return pb.WatchSandboxesEvent(sandbox=pb.WatchSandboxesSandboxEvent(sandbox=sandbox))


@pytest.fixture
async def service() -> Service:
    return Service(WatchHub(capacity=64))


Watch = Callable[[], "grpc.aio.UnaryStreamCall[Any, pb.WatchSandboxesEvent]"]


@pytest.fixture
async def watch(service: Service, tmp_path: Path) -> AsyncIterator[Watch]:
    handler = grpc.unary_stream_rpc_method_handler(
        service.watch_sandboxes,
        request_deserializer=pb.WatchSandboxesRequest.FromString,
        response_serializer=pb.WatchSandboxesEvent.SerializeToString,
    )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("driver", {"Watch": handler})])
    address = f"unix:{tmp_path / 'driver.sock'}"
    server.add_insecure_port(address)
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_stream(
            "/driver/Watch",
            request_serializer=pb.WatchSandboxesRequest.SerializeToString,
            response_deserializer=pb.WatchSandboxesEvent.FromString,
        )
        yield lambda: call(pb.WatchSandboxesRequest())
    await server.stop(grace=0)


async def next_id(call: grpc.aio.UnaryStreamCall[Any, pb.WatchSandboxesEvent]) -> str:
    read = await call.read()
    assert isinstance(read, pb.WatchSandboxesEvent)
    return read.sandbox.sandbox.id


async def test_over_the_wire_replay_comes_first_and_live_events_follow(service: Service, watch: Watch) -> None:
    call = watch()
    assert await next_id(call) == "replayed"
    service.hub.publish(event("live"))
    assert await next_id(call) == "live"
    call.cancel()


async def test_over_the_wire_a_peer_that_does_not_read_gets_resource_exhausted(service: Service, watch: Watch) -> None:
    call = watch()
    assert await next_id(call) == "replayed"
    # More than every buffer of the transport between the two holds, so that the peer's pause reaches the hub.
    while service.hub.cut_off_count == 0:
        service.hub.publish(event("big", padding_bytes=64 * 1024))
        await asyncio.sleep(0)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while await next_id(call) == "big":
            pass
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await service.idle.wait()
    assert service.hub.reader_count == 0


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_a_thousand_opened_and_cancelled_watches_leave_nothing(service: Service, watch: Watch) -> None:
    async def open_and_cancel() -> None:
        call = watch()
        await call.read()
        call.cancel()
        await asyncio.wait([asyncio.ensure_future(call.code())])

    await open_and_cancel()
    await service.idle.wait()
    before = (threading.active_count(), descriptors())
    for _ in range(20):
        await asyncio.gather(*(open_and_cancel() for _ in range(50)))
        service.hub.publish(event("live"))
    await service.idle.wait()
    gc.collect()
    assert service.hub.reader_count == 0
    assert service.handlers == 0
    threads, open_descriptors = before
    assert threading.active_count() <= threads
    assert descriptors() <= open_descriptors
    assert len(asyncio.all_tasks()) < 20
