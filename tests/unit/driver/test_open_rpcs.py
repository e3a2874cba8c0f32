"""How open RPCs end with the driver, and how many watches there may be: over real sockets, with stalled peers."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import grpc
import pytest

from driver_docker import encode
from driver_docker.errors import ShuttingDownError
from driver_docker.metrics import Metrics
from driver_docker.open_rpcs import MAX_WATCHES, OpenRpcs, TooManyWatchesError
from driver_docker.rpc_observer import RpcObserver
from driver_docker.serve import stop_server
from driver_docker.server import MAX_CONCURRENT_RPCS, ComputeDriverService, make_server
from driver_docker.watch import WatchHub
from openshell.wire.compute.v1 import compute_driver_pb2 as pb
from openshell.wire.compute.v1 import compute_driver_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


class Lifecycle:
    """Stops nothing, for as long as it is let."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.may_end = asyncio.Event()
        self.cancelled = False

    async def stop(self, **_: object) -> None:
        self.begun.set()
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise

    async def list(self) -> list[Any]:
        return []


class Room:
    """A driver's server without an engine."""

    def __init__(self) -> None:
        async def tell_untold(_: object) -> None: ...

        nothing = cast("Any", SimpleNamespace(older=False, info=None))
        self.hub: WatchHub[pb.WatchSandboxesEvent] = WatchHub(capacity=4096)
        self.lifecycle = Lifecycle()
        services = SimpleNamespace(
            config=None, engine=nothing, handshake=nothing, table=(), tell_untold=tell_untold, owner=nothing
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(encode, "capabilities", lambda *_: None)
            self.service = ComputeDriverService(cast("Any", services), cast("Any", self.lifecycle), self.hub)
        self.server = make_server(self.service, interceptors=(RpcObserver(Metrics()),))

    async def end(self) -> None:
        self.hub.close()
        await stop_server(self.server, self.service.open_rpcs)


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[Room]:
    room = Room()
    room.server.add_insecure_port(f"unix:{folder}/s")
    await room.server.start()
    try:
        yield room
    finally:
        room.lifecycle.may_end.set()
        await room.end()


class StallingRelay:
    """Stands before a server's socket and stops taking what it sends, as a stopped process does."""

    def __init__(self, folder: Path) -> None:
        self.holds_back = asyncio.Event()
        """Set once it has something that it does not pass on."""
        self._folder = folder
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._tasks: set[asyncio.Task[None]] = set()

    def stall(self) -> None:
        self._flowing.clear()

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_unix_server(self._accept, f"{self._folder}/relay")
        return f"unix:{self._folder}/relay"

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, peer: asyncio.StreamReader, to_peer: asyncio.StreamWriter) -> None:
        driver, to_driver = await asyncio.open_unix_connection(f"{self._folder}/s", limit=1024)
        for source, sink, stalls in ((peer, to_driver, False), (driver, to_peer, True)):
            self._tasks.add(asyncio.create_task(self._pass(source, sink, stalls=stalls)))

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, stalls: bool) -> None:
        with contextlib.closing(sink):
            while data := await source.read(1024):
                if stalls and not self._flowing.is_set():
                    self.holds_back.set()
                    await self._flowing.wait()
                sink.write(data)


async def test_a_peer_that_does_not_read_does_not_keep_the_driver_from_ending(tmp_path: Path) -> None:
    relay = StallingRelay(tmp_path)
    async with served(tmp_path) as room, relay as address, grpc.aio.insecure_channel(address) as channel:
        watch = pb_grpc.ComputeDriverStub(channel).WatchSandboxes(pb.WatchSandboxesRequest())
        await cast("Any", watch).initial_metadata()
        relay.stall()
        event = pb.WatchSandboxesEvent(deleted=pb.WatchSandboxesDeletedEvent(sandbox_id="x" * 2000))
        for _ in range(800):
            room.hub.publish(event)
            await asyncio.sleep(0)
        async with asyncio.timeout(20):
            await relay.holds_back.wait()
            await _standing_still(room, tmp_path)
        async with asyncio.timeout(4):
            await room.end()


async def _standing_still(room: Room, folder: Path) -> None:
    """Until what waits for the only watcher gets no less while others are answered."""
    (reader,) = room.hub._readers
    async with grpc.aio.insecure_channel(f"unix:{folder}/s") as channel:
        stub: Any = pb_grpc.ComputeDriverStub(channel)
        before, waiting = 0, len(reader._queue)
        while waiting != before:
            for _ in range(5):
                await stub.ListSandboxes(pb.ListSandboxesRequest())
            before, waiting = waiting, len(reader._queue)
    assert waiting > 0, "the server could send everything"


async def test_what_is_under_way_when_the_driver_ends_is_cancelled_and_told_in_its_own_words(tmp_path: Path) -> None:
    async with served(tmp_path) as room, grpc.aio.insecure_channel(f"unix:{tmp_path}/s") as channel:
        stub: Any = pb_grpc.ComputeDriverStub(channel)
        stop = stub.StopSandbox(pb.StopSandboxRequest(sandbox_id="a"))
        await room.lifecycle.begun.wait()
        await room.end()
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await stop
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        assert ended.value.details() == "the driver shut down before this was done; try again once it is back"
        assert room.lifecycle.cancelled


async def test_what_ends_soon_enough_is_answered_while_the_driver_ends(tmp_path: Path) -> None:
    async with served(tmp_path) as room, grpc.aio.insecure_channel(f"unix:{tmp_path}/s") as channel:
        stub: Any = pb_grpc.ComputeDriverStub(channel)
        stop = stub.StopSandbox(pb.StopSandboxRequest(sandbox_id="a"))
        await room.lifecycle.begun.wait()
        ending = asyncio.create_task(room.end())
        await asyncio.sleep(0)
        room.lifecycle.may_end.set()
        assert await stop == pb.StopSandboxResponse()
        await ending


async def test_a_caller_that_gives_up_cancels_its_call(tmp_path: Path) -> None:
    async with served(tmp_path) as room, grpc.aio.insecure_channel(f"unix:{tmp_path}/s") as channel:
        stub: Any = pb_grpc.ComputeDriverStub(channel)
        stop = stub.StopSandbox(pb.StopSandboxRequest(sandbox_id="a"))
        await room.lifecycle.begun.wait()
        stop.cancel()
        await room.service.open_rpcs.drained()
        assert room.lifecycle.cancelled


async def test_as_many_watches_as_there_may_be_leave_room_for_every_verb(tmp_path: Path) -> None:
    async with served(tmp_path) as room, grpc.aio.insecure_channel(f"unix:{tmp_path}/s") as channel:
        stub: Any = pb_grpc.ComputeDriverStub(channel)
        watches = [stub.WatchSandboxes(pb.WatchSandboxesRequest()) for _ in range(MAX_WATCHES)]
        for watch in watches:
            await watch.initial_metadata()
        refused = stub.WatchSandboxes(pb.WatchSandboxesRequest(), timeout=10)
        assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert f"{MAX_WATCHES} watches are open already" in await refused.details()
        assert room.hub.reader_count == MAX_WATCHES
        assert await stub.ListSandboxes(pb.ListSandboxesRequest(), timeout=10) == pb.ListSandboxesResponse()
    assert MAX_WATCHES * 2 < MAX_CONCURRENT_RPCS


async def test_a_watch_that_is_over_makes_room_for_another() -> None:
    over: list[Any] = []
    context = cast("Any", SimpleNamespace(add_done_callback=over.append))
    rpcs = OpenRpcs(max_watches=1)
    rpcs.admit_watch(context)
    with pytest.raises(TooManyWatchesError):
        rpcs.admit_watch(context)
    over[0](context)
    rpcs.admit_watch(context)


async def test_bytes_that_are_no_request_are_refused_as_an_invalid_argument(tmp_path: Path) -> None:
    async with served(tmp_path), grpc.aio.insecure_channel(f"unix:{tmp_path}/s") as channel:
        for method in ("CreateSandbox", "StopSandbox", "WatchSandboxes"):
            path = f"/openshell.compute.v1.ComputeDriver/{method}"
            call: Any = cast("Any", channel).unary_stream(path)(b"\xff\xff\xff")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call.read()
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "cannot be decoded" in str(refused.value.details())


async def test_the_end_of_a_call_that_cannot_be_cancelled_is_not_waited_for() -> None:
    rpcs, may_end = OpenRpcs(), asyncio.Event()

    async def stubborn() -> int:
        while not may_end.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await may_end.wait()
        return 1

    answer = asyncio.create_task(rpcs.answer(stubborn()))
    await asyncio.sleep(0)
    rpcs.end()
    with pytest.raises(ShuttingDownError, match="shut down before"):
        await answer
    may_end.set()
    await rpcs.drained()
