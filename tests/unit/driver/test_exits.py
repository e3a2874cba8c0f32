"""What is told of the end of a ready sandbox's containers, and what an engine that does not answer must not decide."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from scripted.memory_engine import AT, SUPERVISOR, WORKLOAD, MemoryDriver, engine_event, memory_driver

from driver_docker.engine import EngineError, EngineRefusedError, EngineTimeoutError
from driver_docker.engine_objects import ContainerStatus
from driver_docker.events import PlatformEvent, Snapshot
from driver_docker.exits import Exits
from openshell.verdicts import Component, VerdictKind

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from driver_docker.sandboxes import Sandbox


@pytest.fixture
async def driver(tmp_path: Path) -> AsyncIterator[MemoryDriver]:
    async with memory_driver(tmp_path) as made:
        yield made


@pytest.fixture(autouse=True)
def _no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """No event comes here that could be waited for."""
    monkeypatch.setattr("driver_docker.exits._FOLLOW_GRACE_SECONDS", 0)


def _end_both(driver: MemoryDriver, *, supervisor_leads: timedelta) -> None:
    driver.engine.change(WORKLOAD, status=ContainerStatus.EXITED, exit_code=0, finished_at=AT)
    driver.engine.change(SUPERVISOR, status=ContainerStatus.EXITED, exit_code=6, finished_at=AT - supervisor_leads)


def _refuse_inspects(driver: MemoryDriver, *numbers: int, error: EngineError) -> None:
    """Refuse the inspects with these numbers, counted from one."""
    seen = 0

    def refuse(call: str, _about: str) -> Exception | None:
        nonlocal seen
        seen += call == "inspect_container"
        return error if call == "inspect_container" and seen in numbers else None

    driver.engine.refuse = refuse


async def _look(driver: MemoryDriver, exits: Exits, sandbox: Sandbox) -> None:
    """One look of the observer's at two containers that have ended."""
    if sandbox.record.failure is None:
        exits.both_ended(sandbox)
    await driver.settle()


def _verdicts(driver: MemoryDriver) -> list[str]:
    return [
        event.metadata["openshell.verdict.component"] + " " + event.metadata["openshell.verdict.kind"]
        for event in driver.told
        if isinstance(event, PlatformEvent) and "openshell.verdict.kind" in event.metadata
    ]


@pytest.mark.parametrize("missed", [(), (1,), (2,), (1, 2, 3, 4), (3,), (3, 4)])
@pytest.mark.parametrize(
    ("supervisor_leads", "told"),
    [(timedelta(seconds=60), "supervisor exited"), (timedelta(seconds=0), "workload ended_unasked")],
)
async def test_a_look_that_the_engine_did_not_answer_neither_blames_nor_hides(
    driver: MemoryDriver, missed: tuple[int, ...], supervisor_leads: timedelta, told: str
) -> None:
    sandbox = await driver.active()
    exits = Exits(driver.services, driver.background)
    _end_both(driver, supervisor_leads=supervisor_leads)
    _refuse_inspects(driver, *missed, error=EngineTimeoutError("slow"))
    for _ in range(6):
        await _look(driver, exits, sandbox)
    assert _verdicts(driver) == [told]
    assert sandbox.record.failure is not None


@pytest.mark.parametrize(
    "error", [EngineRefusedError("driver failed"), EngineTimeoutError("slow"), EngineError("no JSON")]
)
async def test_an_inspect_that_fails_is_no_end(driver: MemoryDriver, error: EngineError) -> None:
    sandbox = await driver.active()
    exits = Exits(driver.services, driver.background)
    driver.engine.refuse = lambda call, about: error if (call, about) == ("inspect_container", SUPERVISOR) else None
    exits.ended(sandbox, Component.SUPERVISOR)
    await driver.settle()
    assert driver.told == []
    assert sandbox.record.failure is None
    assert {facts.status for facts in driver.engine.containers.values()} == {ContainerStatus.RUNNING}
    driver.engine.refuse = lambda *_: None
    driver.engine.change(SUPERVISOR, status=ContainerStatus.EXITED, exit_code=9, finished_at=AT)
    exits.ended(sandbox, Component.SUPERVISOR)
    await driver.settle()
    assert _verdicts(driver) == [f"supervisor {VerdictKind.EXITED}"]


async def test_a_ready_workload_that_is_removed_by_force_is_told_as_removed(driver: MemoryDriver) -> None:
    sandbox = await driver.active()
    driver.engine.change(WORKLOAD, status=ContainerStatus.REMOVING, exit_code=137, finished_at=AT)
    observer = driver.observer()
    observer.take(engine_event("kill", WORKLOAD, signal="9"))
    observer.take(engine_event("die", WORKLOAD, exitCode="137"))
    await driver.settle()
    assert _verdicts(driver) == [f"workload {VerdictKind.REMOVED}"]
    assert sandbox.record.failure is not None
    assert sandbox.record.failure.reason == "ContainerExited"
    assert not any(isinstance(event, Snapshot) and event.deleting for event in driver.told)


async def test_a_state_that_is_not_known_is_no_end(driver: MemoryDriver) -> None:
    sandbox = await driver.active()
    driver.engine.change(WORKLOAD, status=ContainerStatus.UNKNOWN)
    Exits(driver.services, driver.background).ended(sandbox, Component.WORKLOAD)
    await driver.settle()
    assert (driver.told, sandbox.record.failure) == ([], None)


async def test_an_end_whose_handling_failed_is_taken_up_by_the_next_look(
    driver: MemoryDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = await driver.active()
    exits = Exits(driver.services, driver.background)
    driver.engine.change(WORKLOAD, status=ContainerStatus.EXITED, exit_code=3, finished_at=AT)
    with monkeypatch.context() as broken:
        broken.setattr("driver_docker.exits.examine", lambda *_, **__: 1 / 0)
        exits.ended(sandbox, Component.WORKLOAD)
        await driver.settle()
    assert [type(error) for error in driver.failures] == [ZeroDivisionError]
    driver.failures.clear()
    exits.ended(sandbox, Component.WORKLOAD)
    await driver.settle()
    assert _verdicts(driver) == ["workload exited"]


@pytest.mark.parametrize(
    ("workload", "supervisor", "reason"),
    [
        (255, 255, "ContainerRuntimeRestart"),
        (255, 0, "ContainerExited"),
        (7, 255, "ContainerExited"),
        (7, 7, "ContainerExited"),
    ],
)
async def test_an_engine_that_lost_both_containers_was_restarted(
    driver: MemoryDriver, workload: int, supervisor: int, reason: str
) -> None:
    sandbox = await driver.active()
    driver.engine.change(WORKLOAD, status=ContainerStatus.EXITED, exit_code=workload, finished_at=AT)
    driver.engine.change(SUPERVISOR, status=ContainerStatus.EXITED, exit_code=supervisor, finished_at=AT)
    await _look(driver, Exits(driver.services, driver.background), sandbox)
    assert _verdicts(driver) == ["workload exited"]
    assert sandbox.record.failure is not None
    assert sandbox.record.failure.reason == reason


@pytest.mark.parametrize(
    "seen",
    [
        pytest.param([Component.WORKLOAD], id="by a Get"),
        pytest.param([Component.SUPERVISOR], id="supervisor alone"),
        pytest.param([Component.SUPERVISOR, Component.WORKLOAD], id="supervisor first"),
    ],
)
@pytest.mark.parametrize("supervisor_leads", [timedelta(0), timedelta(seconds=60)])
async def test_both_lost_is_a_restart_however_it_is_seen_first(
    driver: MemoryDriver, seen: list[Component], supervisor_leads: timedelta
) -> None:
    sandbox = await driver.active()
    exits = Exits(driver.services, driver.background)
    _end_both(driver, supervisor_leads=supervisor_leads)
    for container in (WORKLOAD, SUPERVISOR):
        driver.engine.change(container, exit_code=255)
    for component in seen:
        exits.ended(sandbox, component)
    await driver.settle()
    assert _verdicts(driver) == ["workload exited"]
    assert sandbox.record.failure is not None
    assert sandbox.record.failure.reason == "ContainerRuntimeRestart"


async def test_both_lost_long_after_each_other_is_a_restart(driver: MemoryDriver) -> None:
    sandbox = await driver.active()
    _end_both(driver, supervisor_leads=timedelta(seconds=60))
    for container in (WORKLOAD, SUPERVISOR):
        driver.engine.change(container, exit_code=255)
    await _look(driver, Exits(driver.services, driver.background), sandbox)
    assert _verdicts(driver) == ["workload exited"]


async def test_whether_both_are_lost_is_asked_again_where_the_engine_did_not_say(driver: MemoryDriver) -> None:
    sandbox = await driver.active()
    exits = Exits(driver.services, driver.background)
    _end_both(driver, supervisor_leads=timedelta(0))
    for container in (WORKLOAD, SUPERVISOR):
        driver.engine.change(container, exit_code=255)
    _refuse_inspects(driver, 2, error=EngineTimeoutError("slow"))
    exits.ended(sandbox, Component.WORKLOAD)
    await driver.settle()
    assert _verdicts(driver) == []
    exits.ended(sandbox, Component.WORKLOAD)
    await driver.settle()
    assert sandbox.record.failure is not None
    assert sandbox.record.failure.reason == "ContainerRuntimeRestart"


@pytest.mark.parametrize("error", [EngineRefusedError("did not receive an exit event"), EngineTimeoutError("slow")])
async def test_a_supervisor_is_removed_only_after_its_workload_has_ended(
    driver: MemoryDriver, error: EngineError
) -> None:
    sandbox = await driver.active()
    exits = Exits(driver.services, driver.background)
    driver.engine.change(SUPERVISOR, status=ContainerStatus.EXITED, exit_code=3, finished_at=AT)
    driver.engine.refuse = lambda call, _about: error if call in {"stop_container", "unpause_container"} else None
    exits.ended(sandbox, Component.SUPERVISOR)
    await driver.settle()
    assert _verdicts(driver) == ["supervisor exited"]
    assert set(driver.engine.containers) == {WORKLOAD, SUPERVISOR}
    await exits.finish(sandbox)
    assert set(driver.engine.containers) == {WORKLOAD, SUPERVISOR}
    driver.engine.refuse = lambda *_: None
    await exits.finish(sandbox)
    assert set(driver.engine.containers) == {WORKLOAD}
    assert driver.engine.containers[WORKLOAD].status is ContainerStatus.EXITED


async def test_a_paused_workload_of_a_lost_supervisor_is_stopped_on_an_engine_that_must_unpause_it(
    driver: MemoryDriver,
) -> None:
    sandbox = await driver.active()
    driver.engine.change(WORKLOAD, status=ContainerStatus.PAUSED)
    driver.engine.change(SUPERVISOR, status=ContainerStatus.EXITED, exit_code=3, finished_at=AT)
    driver.engine.refuse = lambda call, about: (
        EngineRefusedError("paused")
        if call == "stop_container" and driver.engine.containers[about].status is ContainerStatus.PAUSED
        else None
    )
    Exits(driver.services, driver.background).ended(sandbox, Component.SUPERVISOR)
    await driver.settle()
    assert set(driver.engine.containers) == {WORKLOAD}
    assert driver.engine.containers[WORKLOAD].status is ContainerStatus.EXITED


@pytest.mark.parametrize("refused", ["sb/exits.json", "exits.jsonl"])
async def test_a_verdict_that_one_file_refuses_is_in_the_other(driver: MemoryDriver, refused: str) -> None:
    sandbox = await driver.active()
    services = driver.services
    (services.store.directory / refused).mkdir()
    driver.engine.change(SUPERVISOR, status=ContainerStatus.EXITED, exit_code=9, finished_at=AT)
    Exits(services, driver.background).ended(sandbox, Component.SUPERVISOR)
    await driver.settle()
    kept = services.journal.read() if refused == "sb/exits.json" else services.store.exits("sb")
    assert len(kept) == 1
    assert _verdicts(driver) == ["supervisor exited"]


async def test_a_disk_without_a_thread_keeps_nothing_running(driver: MemoryDriver) -> None:
    sandbox = await driver.active()
    driver.services.disk.close()
    driver.engine.change(SUPERVISOR, status=ContainerStatus.EXITED, exit_code=9, finished_at=AT)
    Exits(driver.services, driver.background).ended(sandbox, Component.SUPERVISOR)
    await driver.settle()
    assert _verdicts(driver) == ["supervisor exited"]
    assert set(driver.engine.containers) == {WORKLOAD}
    assert driver.engine.containers[WORKLOAD].status is ContainerStatus.EXITED
    assert sandbox.unsaved
