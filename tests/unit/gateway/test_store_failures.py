"""A database that fails, or that loses a sandbox at the wrong moment, ends nothing but what it concerns."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from scripted.compute_driver import condition
from scripted.gateway_bench import GatewayBench, read

from gateway_embedded.background import BackgroundTasks
from gateway_embedded.config import Deadlines, DriverTimings
from gateway_embedded.database import Database
from gateway_embedded.deadlines import DeadlineKeeper
from gateway_embedded.errors import StoreError
from gateway_embedded.events import EventHub
from gateway_embedded.observation import DriverObserver
from gateway_embedded.sandboxes import Launch, Phase, PlatformEvent, Provisioning, SandboxRecord, SandboxStatus
from gateway_embedded.sessions import SessionRegistry
from gateway_embedded.states import Decide, SandboxStates
from gateway_embedded.store import SandboxStore
from openshell.wire.compute.v1 import compute_driver_pb2 as pb

NOW = datetime(2026, 10, 1, 12, tzinfo=UTC)
FULL = "CREATE TRIGGER full BEFORE UPDATE ON sandboxes BEGIN SELECT RAISE(ABORT, 'disk is full'); END"


class Failing(SandboxStates):
    """The first changes cannot be stored."""

    failures = 2

    async def change(self, sandbox_id: str, decide: Decide) -> SandboxRecord:
        if self.failures:
            self.failures -= 1
            raise StoreError("disk is full")
        return await super().change(sandbox_id, decide)


class StoppingDriver:
    """Stops whatever it is asked to."""

    async def stop(self, *_: object, **__: object) -> None:
        return None


@pytest.fixture
async def database() -> AsyncIterator[Database]:
    opened = Database("sqlite://")
    await opened.open()
    yield opened
    await opened.close()


def record() -> SandboxRecord:
    return SandboxRecord(
        id="id",
        name="alpha",
        workspace="default",
        created_at=NOW,
        spec=b"",
        launch=Launch(generation="g", session_id="s", session_rotation=1, auth_epoch=1),
        status=SandboxStatus(phase=Phase.PROVISIONING),
        provisioning=Provisioning(attempt_id="a", preparation_deadline=NOW - timedelta(seconds=1)),
    )


async def test_a_snapshot_that_cannot_be_stored_does_not_end_the_gateway(bench: GatewayBench) -> None:
    sandbox = await bench.create()
    watch = bench.watch(follow_events=True)
    await read(watch)
    state = sqlite3.connect(bench.config.state_dir / "gateway.sqlite3")
    state.execute(FULL)
    state.commit()
    bench.driver.backend_ready(sandbox.metadata.id)
    bench.driver.event(sandbox.metadata.id, pb.DriverPlatformEvent(source="docker", type="Normal", reason="Next"))
    # Events are taken one after the other: the snapshot before this one is dealt with.
    assert (await read(watch)).event.reason == "Next"
    state.execute("DROP TRIGGER full")
    state.commit()
    state.close()
    bench.driver.snapshot(sandbox.metadata.id, condition("False", "OuterFenceViolation", "fence is gone"))
    await bench.until_reason("OuterFenceViolation")
    watch.cancel()


async def test_a_deadline_that_cannot_be_stored_is_due_again(database: Database) -> None:
    tasks = BackgroundTasks()
    states = Failing(SandboxStore(database), EventHub(), SessionRegistry(), tasks, clock=lambda: datetime.now(UTC))
    driver: Any = StoppingDriver()
    keeper = DeadlineKeeper(states, driver, tasks, Deadlines(cleanup_retry_seconds=0.01))
    with states.hub.subscribe("id") as reader:
        await states.add(record(), None)
        running = asyncio.create_task(keeper.run())
        while True:
            item = await asyncio.wait_for(reader.get(), 10)
            assert item is not None
            assert isinstance(item.content, SandboxRecord)
            if item.content.provisioning.cleanup_completed_time is not None:
                break
    assert states.failures == 0
    assert item.content.status.phase is Phase.ERROR
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await tasks.settle()


@pytest.mark.parametrize("order", ["erased, then stored", "stored, then erased"])
async def test_an_event_of_a_sandbox_that_is_being_erased_leaves_nothing(database: Database, order: str) -> None:
    class Erasing(SandboxStore):
        """Someone erases the sandbox while its event is stored."""

        async def keep_event(self, sandbox_id: str, event: PlatformEvent) -> bool:
            if order == "erased, then stored":
                await states.remove(sandbox_id)
                return await super().keep_event(sandbox_id, event)
            kept = await super().keep_event(sandbox_id, event)
            await states.remove(sandbox_id)
            return kept

    store = Erasing(database)
    hub = EventHub()
    states = SandboxStates(store, hub, SessionRegistry(), BackgroundTasks(), clock=lambda: NOW)
    await states.add(record(), None)
    nobody: Any = None
    observer = DriverObserver(states, nobody, nobody, DriverTimings())
    event = pb.DriverPlatformEvent(source="docker", type="Warning", reason="ControlSupervisorExited")
    told = pb.WatchSandboxesPlatformEvent(sandbox_id="id", event=event)
    await observer._apply(pb.WatchSandboxesEvent(platform_event=told))
    assert not states.knows("id")
    assert await store.kept_events() == []
    with hub.subscribe("id", event_tail=10) as reader:
        assert reader.earlier == []
