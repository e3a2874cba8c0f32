"""A failure reaches the gateway once, also where nobody watched when it happened."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import grpc
import pytest

from driver_docker import encode
from driver_docker.exits import failure_of
from driver_docker.labels import Owner
from driver_docker.records import RecordStore
from driver_docker.sandbox_record import RecordPhase, SandboxRecord
from driver_docker.sandboxes import SandboxTable
from driver_docker.server import ComputeDriverService
from driver_docker.services import Services
from driver_docker.watch import WatchHub
from openshell.verdicts import Component, Verdict, VerdictKind
from openshell.wire.compute.v1 import compute_driver_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from driver_docker.sandboxes import Sandbox

NOW = datetime(2026, 10, 5, tzinfo=UTC)
VERDICT = Verdict(
    kind=VerdictKind.EXITED,
    reason="ControlSupervisorExited",
    component=Component.SUPERVISOR,
    exit_code=7,
    finished_at=NOW,
)

pytestmark = pytest.mark.usefixtures("no_leaks")


class Room:
    """A driver without an engine: its records, its hub and its service."""

    def __init__(self, folder: Path) -> None:
        self.hub: WatchHub[pb.WatchSandboxesEvent] = WatchHub()
        nothing = cast("Any", SimpleNamespace(older=False, info=None))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(encode, "capabilities", lambda *_: None)
            self.services = Services(
                engine=nothing,
                config=nothing,
                owner=Owner(namespace="n", driver="d"),
                store=RecordStore(folder / "n"),
                table=SandboxTable(),
                handshake=nothing,
                gate=nothing,
                publish=lambda event: self.hub.publish(encode.watch_event(event)),
                watched=lambda: self.hub.reader_count > 0,
            )
            self.service = ComputeDriverService(self.services, nothing, self.hub)
        self.services.store.open()

    def fail(self, sandbox: Sandbox) -> bool:
        sandbox.record = sandbox.record.changed(NOW, failure=failure_of(VERDICT))
        return self.services.tell_failure(sandbox)


class Watcher:
    """A peer that goes away after some events, or at its first where it takes none."""

    def __init__(self, *, takes: int) -> None:
        self.seen: list[pb.WatchSandboxesEvent] = []
        self.refused: list[str] = []
        self._takes = takes
        self._has_all = asyncio.Event()

    def add_done_callback(self, _: object) -> None:
        pass

    async def send_initial_metadata(self, _: object) -> None:
        pass

    async def write(self, event: pb.WatchSandboxesEvent) -> None:
        if not self._takes:
            self.refused.append(str(event.WhichOneof("payload")))
            raise grpc.aio.UsageError("the peer is gone")
        self.seen.append(event)
        if len(self.seen) == self._takes:
            self._has_all.set()

    async def watch(self, room: Room) -> list[str]:
        watching = asyncio.ensure_future(cast("Any", room.service).WatchSandboxes(pb.WatchSandboxesRequest(), self))
        having = asyncio.create_task(self._has_all.wait())
        await asyncio.wait({watching, having}, return_when=asyncio.FIRST_COMPLETED)
        watching.cancel()
        having.cancel()
        await asyncio.wait({watching, having})
        return [str(event.WhichOneof("payload")) for event in self.seen]


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    made = Room(tmp_path)
    yield made
    made.services.disk.close()


@pytest.fixture
def sandbox(room: Room) -> Sandbox:
    record = SandboxRecord(
        sandbox_id="sb-1", name="n", workspace="w", phase=RecordPhase.ACTIVE, changed_at=NOW, was_ready=True
    )
    return room.services.table.add(record)


def _untold(room: Room) -> bool:
    (record,) = room.services.store.load().records
    assert record.failure is not None
    return record.failure.untold


async def test_the_next_watch_begins_with_the_verdict_that_nobody_watched_for(
    room: Room, sandbox: Sandbox, tmp_path: Path
) -> None:
    assert not room.fail(sandbox)
    await room.services.save(sandbox)
    assert _untold(room)
    again = Room(tmp_path)  # the next driver, from what is on the disk
    again.services.table.add(again.services.store.load().records[0])
    try:
        told = Watcher(takes=2)
        assert await told.watch(again) == ["platform_event", "sandbox"]
        event = told.seen[0].platform_event.event
        assert Verdict.from_metadata(event.metadata) == VERDICT
        assert (event.type, event.event_time.ToDatetime(UTC)) == ("Warning", NOW)
        assert not _untold(again)
    finally:
        again.services.disk.close()


async def test_a_verdict_that_could_not_be_written_to_a_watcher_is_told_to_the_next(
    room: Room, sandbox: Sandbox
) -> None:
    room.fail(sandbox)
    gone = Watcher(takes=0)
    await gone.watch(room)
    assert gone.refused == ["platform_event"]
    assert await Watcher(takes=2).watch(room) == ["platform_event", "sandbox"]
    assert await Watcher(takes=1).watch(room) == ["sandbox"]


async def test_a_verdict_that_was_watched_for_is_not_told_again(room: Room, sandbox: Sandbox) -> None:
    with room.hub.subscribe() as reader:
        assert room.fail(sandbox)
        kinds = [(await anext(reader)).WhichOneof("payload") for _ in range(2)]
        assert kinds == ["platform_event", "sandbox"], "the verdict first"
    await room.services.save(sandbox)
    assert not _untold(room)
    assert await Watcher(takes=1).watch(room) == ["sandbox"]
