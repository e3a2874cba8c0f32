"""Verbs beside real launches over an engine in memory: each comes to its end, whatever the launch is at."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import AsyncMock, Mock

import pytest
from scripted.compute_gateway import sandbox
from scripted.launching_engine import USER_IMAGE, launching

from driver_docker import labels
from driver_docker.concurrency import uninterrupted
from driver_docker.engine import (
    EngineConflictError,
    EngineError,
    EngineRefusedError,
    EngineTimeoutError,
    EngineUnreachableError,
)
from driver_docker.engine_objects import ContainerStatus
from driver_docker.errors import PreconditionError, RecordError
from driver_docker.events import ConditionStatus, PlatformEvent, Snapshot
from driver_docker.exits import Exits
from driver_docker.lifecycle import Lifecycle
from driver_docker.records import LAUNCH_FILES
from driver_docker.requests import decode_sandbox
from driver_docker.retained import CommittedLaunch
from driver_docker.sandbox_record import RecordPhase
from driver_docker.services import Services
from openshell.isolation.documents import LaunchAuthentication
from openshell.verdicts import Category, LastWords, Stage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from scripted.memory_engine import MemoryDriver

    from driver_docker.engine_objects import ContainerFacts, ContainerSpec
    from driver_docker.requests import LaunchRequest
    from driver_docker.sandbox_record import SandboxRecord
    from driver_docker.sandboxes import Sandbox

pytestmark = pytest.mark.usefixtures("no_leaks")

HANGS_SECONDS = 10
"""What takes so long waits for something that never comes."""


@asynccontextmanager
async def living(folder: Path) -> AsyncIterator[tuple[MemoryDriver, Lifecycle]]:
    """A driver whose creates are not validated before."""
    async with launching(folder) as (driver, launcher):
        lifecycle = Lifecycle(driver.services, launcher, Exits(driver.services, driver.background), driver.background)
        made: Any = lifecycle
        made.validate = _nothing
        made._engine.ping = _nothing
        yield driver, lifecycle


async def _nothing(*_: Any) -> None:
    pass


def _request() -> LaunchRequest:
    return decode_sandbox(sandbox(USER_IMAGE), namespace="default", allow_driver_config=False)


async def _create(driver: MemoryDriver, lifecycle: Lifecycle) -> Sandbox:
    request = _request()
    await lifecycle.create(request)
    entry = driver.services.table.by_id(request.sandbox_id)
    assert entry is not None
    return entry


@pytest.mark.parametrize("verb", ["stop", "delete", "abandon_launches"])
async def test_a_verb_ends_a_launch_that_is_just_failing(tmp_path: Path, verb: str) -> None:
    async with living(tmp_path) as (driver, lifecycle):
        original = driver.engine.create_container  # type: ignore[attr-defined]
        refused, answered = asyncio.Event(), asyncio.Event()

        async def create(spec: ContainerSpec) -> Any:
            role = spec.labels.get(labels.ISOLATION_ROLE)
            if role == labels.Role.SANDBOX:
                refused.set()
                raise EngineRefusedError("no such device")
            if role == labels.Role.SUPERVISOR:
                await uninterrupted(answered.wait())  # a create is awaited to its end
            return await original(spec)

        driver.engine.create_container = create  # type: ignore[attr-defined]
        entry = await _create(driver, lifecycle)
        await refused.wait()
        call = (
            lifecycle.abandon_launches()
            if verb == "abandon_launches"
            else getattr(lifecycle, verb)(sandbox_id=entry.sandbox_id, name="")
        )
        called = asyncio.create_task(call)
        for _ in range(5):
            await asyncio.sleep(0)  # it has its turn
        answered.set()
        await asyncio.wait_for(called, HANGS_SECONDS)
        await driver.settle()
        assert [each.name for each in driver.engine.containers.values() if not each.name.endswith("-fill")] == []


@pytest.mark.parametrize(
    "error", [EngineUnreachableError("away"), EngineTimeoutError("slow"), EngineRefusedError("500"), EngineError("odd")]
)
@pytest.mark.parametrize("again", [False, True])
async def test_an_engine_that_does_not_answer_right_after_ready_costs_nothing(
    tmp_path: Path, error: EngineError, again: bool
) -> None:
    async with living(tmp_path) as (driver, lifecycle):
        entry = await _create(driver, lifecycle)
        if again:
            await driver.settle()
            await lifecycle.stop(sandbox_id=entry.sandbox_id, name="")
            await lifecycle.start(sandbox_id=entry.sandbox_id, name="", generation="g-2", launch=None)
        healthy = False

        def refuse(call: str, _about: str) -> Exception | None:
            nonlocal healthy
            healthy |= call == "exec_command"
            return error if healthy and call == "inspect_container" else None

        driver.engine.refuse = refuse
        await driver.settle()
        assert healthy
        assert (entry.record.phase, entry.record.failure) == (RecordPhase.ACTIVE, None)
        ready = driver.services.snapshot(entry).conditions[0]
        assert (ready.status, ready.reason) == (ConditionStatus.TRUE, "BackendReady")


async def test_a_workload_that_is_gone_right_after_ready_is_told_as_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("driver_docker.exits._FOLLOW_GRACE_SECONDS", 0)  # its supervisor does not follow by itself
    async with living(tmp_path) as (driver, lifecycle):
        entry = await _create(driver, lifecycle)

        def refuse(call: str, _about: str) -> Exception | None:
            if call == "exec_command":
                driver.engine.containers.pop(entry.record.workload_id)
            return None

        driver.engine.refuse = refuse
        entry.events[entry.record.workload_id] = []
        await driver.settle()
        assert entry.record.phase is RecordPhase.ACTIVE
        assert entry.record.failure is not None
        assert entry.record.failure.verdict["openshell.verdict.kind"] == "removed"
        assert _containers(driver) == [], "its supervisor goes after it"
        assert "Started" in [event.reason for event in driver.told if isinstance(event, PlatformEvent)]


@pytest.mark.parametrize(
    ("stage", "phase"), [(Stage.RUNNING, RecordPhase.ACTIVE), (Stage.READINESS, RecordPhase.FAILED)]
)
async def test_a_supervisor_that_was_ready_before_the_driver_saw_it_costs_nobody_the_workload(
    tmp_path: Path, stage: Stage, phase: RecordPhase
) -> None:
    async with living(tmp_path) as (driver, lifecycle):
        words = LastWords(stage=stage, category=Category.INFRASTRUCTURE, public="gone").to_line().encode() + b"\n"
        log = bytes((2, 0, 0, 0)) + len(words).to_bytes(4, "big") + words
        cast("Any", driver.engine).log_tail = AsyncMock(return_value=log)
        entry = await _create(driver, lifecycle)

        def refuse(call: str, about: str) -> Exception | None:
            if call != "exec_command":
                return None
            driver.engine.change(about, status=ContainerStatus.EXITED, exit_code=9)
            return EngineRefusedError("is not running")

        driver.engine.refuse = refuse
        await driver.settle()
        assert entry.record.phase is phase
        assert entry.record.failure is not None
        kept = [each for each in driver.engine.containers.values() if each.container_id == entry.record.workload_id]
        assert [each.status for each in kept] == ([ContainerStatus.EXITED] if stage is Stage.RUNNING else [])
        files = {file.name for file in (driver.services.store.directory / entry.sandbox_id).iterdir()}
        assert bool(files & set(LAUNCH_FILES)) is (stage is Stage.RUNNING)
        if stage is Stage.RUNNING:
            assert entry.record.failure.reason == "ControlSupervisorExited"
            stops = [call for call in driver.engine.calls if call[0] in {"stop_container", "remove_container"}]
            order = [call for call in stops if call[1] in {entry.record.workload_id, entry.record.supervisor_id}]
            assert order == [
                ("stop_container", entry.record.workload_id),
                ("remove_container", entry.record.supervisor_id),
            ]


async def test_watch_and_list_agree_on_a_sandbox_whose_launch_failed(tmp_path: Path) -> None:
    async with living(tmp_path) as (driver, lifecycle):
        driver.engine.refuse = lambda call, _: EngineRefusedError("no") if call == "start_container" else None
        await _create(driver, lifecycle)
        await driver.settle()
        told = [event for event in driver.told if isinstance(event, Snapshot)]
        assert any(each.container_id for each in told)
        assert told[-1].container_id == ""
        assert (told[-1],) == await lifecycle.list()


async def _delete_under_another_name(driver: MemoryDriver, lifecycle: Lifecycle, label: str) -> bool:
    """Delete a ready sandbox whose things carry another value of a label than this driver gives."""
    entry = await _create(driver, lifecycle)
    await driver.settle()
    engine = driver.engine
    for container in entry.container_ids:
        facts = engine.containers[container]
        engine.change(container, labels={**facts.labels, label: "another"}, volume_names=tuple(engine.volumes))
    for name, volume in engine.volumes.items():
        engine.volumes[name] = replace(volume, labels={**volume.labels, label: "another"})
    return await lifecycle.delete(sandbox_id=entry.sandbox_id, name="")


async def test_a_delete_removes_the_recorded_containers_also_under_another_name_of_the_driver(tmp_path: Path) -> None:
    async with living(tmp_path) as (driver, lifecycle):
        assert await _delete_under_another_name(driver, lifecycle, labels.DRIVER_OWNER)
        assert _containers(driver) == []
        assert [each for each in driver.engine.volumes.values() if labels.SANDBOX_ID in each.labels] == []


@pytest.mark.parametrize("label", [labels.SANDBOX_ID, labels.SANDBOX_NAMESPACE])
async def test_a_delete_fails_where_a_recorded_container_is_not_of_the_sandbox(tmp_path: Path, label: str) -> None:
    async with living(tmp_path) as (driver, lifecycle):
        with pytest.raises(EngineConflictError, match="remove it by hand"):
            await _delete_under_another_name(driver, lifecycle, label)
        assert len(_containers(driver)) == 2
        assert len(driver.services.table) == 1


@pytest.mark.parametrize("removes", [True, False])
async def test_no_later_driver_takes_a_deletion_that_was_not_recorded_for_somebody_elses(
    tmp_path: Path, removes: bool
) -> None:
    async with living(tmp_path) as (driver, lifecycle):
        entry = await _create(driver, lifecycle)
        await driver.settle()
        store, refusal = cast("Any", driver.services.store), RecordError("the disk refuses")
        kept, store.save = store.save, Mock(side_effect=refusal)
        remove, store.remove = store.remove, Mock(side_effect=refusal)
        remove_files = store.remove_files
        if not removes:
            store.remove_files = Mock(side_effect=refusal)
        with pytest.raises(RecordError):
            await lifecycle.delete(sandbox_id=entry.sandbox_id, name="")
        found = store.load()
        assert (len(found.records), len(_containers(driver))) == ((0, 0) if removes else (1, 2))
        store.save, store.remove, store.remove_files = kept, remove, remove_files
        lifecycle.resume(entry)
        await driver.settle()
        assert (len(driver.services.table), _containers(driver)) == (0, [])


async def test_a_reservation_that_is_cut_leaves_no_record(tmp_path: Path) -> None:
    async with living(tmp_path) as (driver, lifecycle):
        services = driver.services
        save, begun, goes_on = services.store.save, asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def slow(record: SandboxRecord) -> None:
            loop.call_soon_threadsafe(begun.set)
            if not goes_on.wait(HANGS_SECONDS):
                raise AssertionError("the write that was kept back was never let go on")
            save(record)

        services.store.save = slow  # type: ignore[method-assign]
        creating = asyncio.create_task(lifecycle.create(_request()))
        await begun.wait()
        closing = asyncio.create_task(driver.background.close())
        await asyncio.sleep(0)
        goes_on.set()
        await closing
        with pytest.raises(asyncio.CancelledError):
            await creating
        found = services.store.load()
        assert (len(services.table), found.records, found.without) == (0, (), ())


async def test_a_launch_without_a_thread_for_its_certificates_says_so(tmp_path: Path) -> None:
    async with living(tmp_path) as (driver, lifecycle):
        lifecycle._launcher.close()
        entry = await _create(driver, lifecycle)
        await driver.settle()
        assert entry.record.failure is not None
        assert "worker pool certificates is closed" in entry.record.failure.message


async def test_credentials_that_no_supervisor_got_before_the_driver_ended_are_given_to_one_by_a_retry(
    tmp_path: Path,
) -> None:
    async with living(tmp_path) as (driver, lifecycle):
        entry = await _create(driver, lifecycle)
        await driver.settle()
        newer = _newer_credentials(driver, entry)
        ended = AsyncMock(side_effect=RecordError("the driver ended here"))
        starter: Any = lifecycle._starter
        accept, starter._accept = starter._accept, ended
        call = {"sandbox_id": entry.sandbox_id, "name": "", "generation": "g-2"}
        with pytest.raises(RecordError):
            await lifecycle.start(**call, launch=newer)
        starter._accept = accept
        entry.record = driver.services.store.load().records[0]  # what the next driver knows
        for expected in (1, 1):  # once, and then it has them
            await lifecycle.start(**call, launch=newer)
            await driver.settle()
            started = [about for call, about in driver.engine.calls if call == "start_container"]
            assert started.count(entry.record.supervisor_id) == 1 + expected
            assert started.count(entry.record.workload_id) == 1
        assert (entry.record.phase, entry.record.failure) == (RecordPhase.ACTIVE, None)
        assert entry.record.supervisor_epoch == 2


def _newer_credentials(driver: MemoryDriver, entry: Sandbox) -> LaunchAuthentication:
    """Credentials of the next epoch, of the session that a sandbox was launched with."""
    committed = CommittedLaunch.read(driver.services.store, entry.sandbox_id)
    return LaunchAuthentication(
        supervisor=replace(committed.auth, auth_epoch=committed.auth.auth_epoch + 1),
        gateway_id=committed.gateway_id,
        verification_keys=committed.verification_keys,
    )


async def test_what_a_failed_start_has_left_to_do_is_done_though_a_start_that_came_meanwhile_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with living(tmp_path) as (driver, lifecycle):
        entry = await _create(driver, lifecycle)
        await driver.settle()
        newer = _newer_credentials(driver, entry)
        await lifecycle.stop(sandbox_id=entry.sandbox_id, name="")
        saving, saved = asyncio.Event(), asyncio.Event()
        save = Services.save_quietly

        async def slow(services: Services, sandbox: Sandbox) -> None:
            saving.set()
            await saved.wait()
            await save(services, sandbox)

        starter: Any = lifecycle._starter
        supersedes = starter._supersedes

        async def late(sandbox: Sandbox, launch: LaunchAuthentication) -> bool:
            taken = bool(await supersedes(sandbox, launch))
            monkeypatch.setattr(Services, "save_quietly", slow)
            began.set()
            await saving.wait()
            return taken

        began, probing = asyncio.Event(), asyncio.Event()
        starter._supersedes = late
        engine: Any = driver.engine
        engine.exec_command = AsyncMock(side_effect=_after(probing, began, EngineError("odd")))
        call = {"sandbox_id": entry.sandbox_id, "name": "", "generation": "g-2"}
        await lifecycle.start(**call, launch=None)
        await asyncio.wait_for(probing.wait(), HANGS_SECONDS)
        refusal = PreconditionError("the revisions no longer fit")
        cast("Any", driver.services.gate).admit_again = AsyncMock(side_effect=refusal)
        again = asyncio.create_task(lifecycle.start(**call, launch=newer))
        await asyncio.wait_for(saving.wait(), HANGS_SECONDS)
        await asyncio.sleep(0)
        saved.set()
        with pytest.raises(PreconditionError, match="no longer fit"):
            await asyncio.wait_for(again, HANGS_SECONDS)
        await driver.settle()
        assert (entry.record.phase, entry.record.supervisor_id) == (RecordPhase.ACTIVE, "")
        assert entry.record.failure is not None
        assert [each.status for each in _containers(driver)] == [ContainerStatus.EXITED]


def _after(asked: asyncio.Event, began: asyncio.Event, error: Exception) -> Callable[..., Any]:
    async def fail(*_: Any, **__: Any) -> Any:
        asked.set()
        await began.wait()
        raise error

    return fail


def _containers(driver: MemoryDriver) -> list[ContainerFacts]:
    return [each for each in driver.engine.containers.values() if not each.name.endswith("-fill")]
