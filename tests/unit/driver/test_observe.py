"""Observation goes on, whatever an answer looked like, and a stream that keeps silent is not believed for ever."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import structlog
from scripted.memory_engine import AT, SUPERVISOR, WORKLOAD, MemoryDriver, engine_event, memory_driver
from structlog.testing import capture_logs

from driver_docker.engine import EngineError, EngineRefusedError, EngineUnreachableError
from driver_docker.engine_objects import ContainerStatus
from driver_docker.events import PlatformEvent
from driver_docker.sandbox_record import RecordPhase

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine
    from pathlib import Path


@pytest.fixture
async def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[MemoryDriver]:
    monkeypatch.setattr("driver_docker.observe._FIRST_PAUSE_SECONDS", 0)
    monkeypatch.setattr("driver_docker.observe._LONGEST_PAUSE_SECONDS", 0)
    monkeypatch.setattr("driver_docker.exits._FOLLOW_GRACE_SECONDS", 0)
    async with memory_driver(tmp_path) as made:
        yield made


@asynccontextmanager
async def _going_on(*loops: Coroutine[None, None, None]) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(loop) for loop in loops]
    try:
        async with asyncio.timeout(10):
            yield
        assert not any(task.done() for task in tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the loops under test have no pauses here
        await asyncio.sleep(0)


def _fail_lists(driver: MemoryDriver, error: Exception, times: int) -> None:
    left = times

    def refuse(call: str, _about: str) -> Exception | None:
        nonlocal left
        if call != "list_containers" or not left:
            return None
        left -= 1
        return error

    driver.engine.refuse = refuse


UNFORESEEN = [TypeError("unhashable"), KeyError("Id"), OverflowError("year"), RuntimeError("anything")]
FORESEEN = [EngineUnreachableError("down"), EngineError("no JSON")]


@pytest.mark.parametrize("error", [*UNFORESEEN, *FORESEEN], ids=repr)
async def test_the_reader_of_events_outlives_whatever_a_look_fails_with(driver: MemoryDriver, error: Exception) -> None:
    sandbox = await driver.active()
    _fail_lists(driver, error, 1)
    observer = driver.observer()
    async with _going_on(observer.follow()):
        await observer.connected()
        driver.engine.change(WORKLOAD, status=ContainerStatus.EXITED, exit_code=3, finished_at=AT)
        driver.engine.streams[-1].tell("die", WORKLOAD, exitCode="3")
        await _until(lambda: sandbox.record.failure is not None)
    await driver.settle()


@pytest.mark.parametrize("error", [*UNFORESEEN, *FORESEEN], ids=repr)
async def test_the_slow_look_outlives_whatever_it_fails_with(driver: MemoryDriver, error: Exception) -> None:
    sandbox = await driver.active()
    driver.services.config.resync_interval_seconds = 0
    driver.engine.change(WORKLOAD, status=ContainerStatus.EXITED, exit_code=3, finished_at=AT)
    _fail_lists(driver, error, 1)
    async with _going_on(driver.observer().look_now_and_then()):
        await _until(lambda: sandbox.record.failure is not None)
    await driver.settle()


async def test_a_stream_that_does_not_tell_what_a_look_finds_is_read_anew(driver: MemoryDriver) -> None:
    sandbox = await driver.active()
    observer = driver.observer()
    async with _going_on(observer.follow(), _slow(driver, observer.look_now_and_then)):
        await observer.connected()
        driver.engine.change(SUPERVISOR, status=ContainerStatus.EXITED, exit_code=9, finished_at=AT)
        await _until(lambda: len(driver.engine.streams) > 1)
        assert sandbox.record.failure is not None
    await driver.settle()
    assert len([event for event in driver.told if isinstance(event, PlatformEvent)]) == 1


async def test_a_stream_that_told_of_an_end_is_believed(driver: MemoryDriver) -> None:
    sandbox = await driver.active()
    observer = driver.observer()
    async with _going_on(observer.follow()):
        await observer.connected()
        driver.engine.change(SUPERVISOR, status=ContainerStatus.EXITED, exit_code=9, finished_at=AT)
        driver.engine.streams[-1].tell("die", SUPERVISOR, exitCode="9")
        await _until(lambda: bool(sandbox.judged))
        assert not await observer.look_at_all()
        await driver.settle()
        assert not await observer.look_at_all()
    await driver.settle()


@pytest.mark.parametrize("seen", ["event", "look"])
async def test_a_stopped_sandbox_that_somebody_starts_is_stopped_again(driver: MemoryDriver, seen: str) -> None:
    sandbox = await driver.active(phase=RecordPhase.STOPPED, supervisor_id="")
    del driver.engine.containers[SUPERVISOR]
    observer = driver.observer()
    if seen == "look":
        await observer.look_at_all()
    else:
        observer.take(engine_event("start", WORKLOAD))
    await driver.settle()
    assert driver.engine.containers[WORKLOAD].status is ContainerStatus.EXITED
    assert sandbox.record.phase is RecordPhase.STOPPED
    assert [event.reason for event in driver.told if isinstance(event, PlatformEvent)] == ["StartedWhileStopped"]
    driver.told.clear()
    await observer.look_at_all()
    observer.take(engine_event("start", WORKLOAD))  # told late
    await driver.settle()
    assert driver.told == []


async def test_a_stop_of_a_stopped_sandbox_that_the_engine_refuses_is_tried_again(driver: MemoryDriver) -> None:
    sandbox = await driver.active(phase=RecordPhase.STOPPED, supervisor_id="")
    observer = driver.observer()
    driver.engine.refuse = lambda call, _: EngineRefusedError("no") if call == "stop_container" else None
    await observer.look_at_all()
    await driver.settle()
    ready = driver.services.snapshot(sandbox).conditions[0]
    assert (ready.status, ready.reason) == ("Unknown", "ContainerStopped")
    driver.engine.refuse = lambda *_: None
    await observer.look_at_all()
    await driver.settle()
    assert driver.engine.containers[WORKLOAD].status is ContainerStatus.EXITED
    assert sandbox.record.phase is RecordPhase.STOPPED


@pytest.mark.parametrize("seen", ["event", "look"])
async def test_a_paused_supervisor_is_not_ready(driver: MemoryDriver, seen: str) -> None:
    sandbox = await driver.active()
    observer = driver.observer()
    await observer.look_at_all()
    for action, status, told in (
        ("pause", ContainerStatus.PAUSED, ("Unknown", "ContainerPaused", "the supervisor container is paused")),
        ("unpause", ContainerStatus.RUNNING, ("True", "BackendReady", "workload and supervisor are running")),
    ):
        driver.told.clear()
        driver.engine.change(SUPERVISOR, status=status)
        if seen == "look":
            assert await observer.look_at_all()
        else:
            observer.take(engine_event(action, SUPERVISOR))
            assert not await observer.look_at_all()
        (snapshot,) = driver.told
        assert snapshot == driver.services.snapshot(sandbox)
        (ready,) = driver.services.snapshot(sandbox).conditions
        assert (ready.status, ready.reason, ready.message) == told


async def test_a_state_folder_that_is_no_longer_this_drivers_is_told_once(driver: MemoryDriver) -> None:
    observer = driver.observer()
    owner_file = driver.services.store.directory / ".driver-owner"
    own = owner_file.read_text()
    with capture_logs() as logs:
        driver.services.log = structlog.get_logger("driver")
        for content in (own, "another", "another"):
            owner_file.write_text(content)
            await observer.look_at_all()
            await driver.settle()
    assert [entry["log_level"] for entry in logs if "state folder was" in entry["event"]] == ["error"]
    assert driver.services.folder_lost


async def _slow(driver: MemoryDriver, look: Callable[[], Coroutine[None, None, None]]) -> None:
    driver.services.config.resync_interval_seconds = 0
    await look()
