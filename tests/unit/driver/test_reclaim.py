"""What a new driver makes of records and containers: it removes only what certainly belongs to nobody."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from scripted.memory_engine import SUPERVISOR, WORKLOAD, MemoryDriver, memory_driver, record
from structlog.testing import capture_logs

from driver_docker.engine import EngineRefusedError
from driver_docker.engine_objects import ContainerStatus
from driver_docker.errors import SandboxExistsError, SandboxNotFoundError, UnreadableRecordError
from driver_docker.reclaim import reclaim
from driver_docker.records import LAUNCH_FILES, RECORD_FILE
from driver_docker.sandbox_record import RecordPhase

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path


@pytest.fixture
async def driver(tmp_path: Path) -> AsyncIterator[MemoryDriver]:
    async with memory_driver(tmp_path) as made:
        yield made


def _of_a_newer_driver(file: Path) -> None:
    file.write_text(json.dumps(json.loads(file.read_bytes()) | {"version": 2}))


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:40])


def _no_file(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _of_another(file: Path) -> None:
    file.write_text(json.dumps(json.loads(file.read_bytes()) | {"sandbox_id": "other"}))


@pytest.mark.parametrize("damage", [_of_a_newer_driver, _cut, _no_file, _of_another])
async def test_nothing_of_a_sandbox_whose_record_cannot_be_read_is_touched(
    driver: MemoryDriver, damage: Callable[[Path], None]
) -> None:
    services, engine = driver.services, driver.engine
    services.store.save(record())
    services.store.save_files("sb", {"supervisor-auth.json": b"secret"})
    services.store.save(record("fine", workload_id="fine-w", supervisor_id="fine-s"))
    for name in (WORKLOAD, SUPERVISOR):
        driver.hold(name)
    for name in ("fine-w", "fine-s"):
        driver.hold(name, "fine")
    driver.hold("lost-w", "lost")
    driver.hold_volume("channel")
    driver.hold_volume("lost-channel", "lost")
    folder = services.store.directory / "sb"
    damage(folder / RECORD_FILE)
    await reclaim(services)
    assert set(engine.containers) == {WORKLOAD, SUPERVISOR, "fine-w", "fine-s"}
    assert set(engine.volumes) == {"channel"}
    assert (folder / "supervisor-auth.json").read_bytes() == b"secret"
    assert [sandbox.sandbox_id for sandbox in services.table] == ["fine"]


async def test_a_sandbox_whose_record_cannot_be_read_is_neither_absent_nor_free(driver: MemoryDriver) -> None:
    services = driver.services
    services.store.save(record())
    _of_a_newer_driver(services.store.directory / "sb" / RECORD_FILE)
    await reclaim(services)
    table = services.table
    with pytest.raises(UnreadableRecordError, match=r"sb/record.json cannot be read: it is of version 2"):
        table.find(sandbox_id="sb", name="")
    with pytest.raises(UnreadableRecordError):
        table.find(sandbox_id="", name="n")  # it may be the one
    with pytest.raises(SandboxNotFoundError):
        table.find(sandbox_id="another", name="")
    with pytest.raises(SandboxExistsError):
        table.add(record())
    assert await services.remove_record("sb")
    with pytest.raises(SandboxNotFoundError):
        table.find(sandbox_id="sb", name="")
    table.add(record())


async def test_what_a_newer_driver_added_to_a_record_is_left_out(driver: MemoryDriver) -> None:
    services = driver.services
    services.store.save(record())
    file = services.store.directory / "sb" / RECORD_FILE
    file.write_text(json.dumps(json.loads(file.read_bytes()) | {"added": 1}))
    for name in (WORKLOAD, SUPERVISOR):
        driver.hold(name)
    await reclaim(services)
    assert set(driver.engine.containers) == {WORKLOAD, SUPERVISOR}
    assert [sandbox.record for sandbox in services.table] == [record()]


async def test_a_folder_that_cannot_be_removed_does_not_keep_the_driver_from_coming_up(
    driver: MemoryDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    services = driver.services
    services.store.save(record())
    for name in (WORKLOAD, SUPERVISOR):
        driver.hold(name)
    (services.store.directory / "half").mkdir()

    def refuse(_folder: Any) -> None:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr("shutil.rmtree", refuse)
    await reclaim(services)
    assert [sandbox.sandbox_id for sandbox in services.table] == ["sb"]


@pytest.mark.parametrize("phase", [RecordPhase.PROVISIONING, RecordPhase.FAILED])
async def test_no_secret_of_a_launch_that_was_cut_stays_on_the_disk(driver: MemoryDriver, phase: RecordPhase) -> None:
    services = driver.services
    services.store.save(record(phase=phase))
    services.store.save_files("sb", dict.fromkeys(LAUNCH_FILES, b"secret"))
    (services.store.directory / "sb" / ".boundary-server.key.0123abcd").write_bytes(b"secret")
    driver.hold(WORKLOAD)
    driver.hold_volume("supervisor")
    await reclaim(services)
    (sandbox,) = services.table
    assert (sandbox.record.phase, sandbox.cleared) == (RecordPhase.FAILED, True)
    (stored,) = services.store.load().records
    assert stored == sandbox.record
    assert sandbox.container_ids == frozenset()  # it names containers no more
    assert [file.name for file in (services.store.directory / "sb").iterdir()] == [RECORD_FILE]
    assert (driver.engine.containers, driver.engine.volumes) == ({}, {})


async def test_a_launch_that_was_cut_is_logged_with_its_sandbox(driver: MemoryDriver) -> None:
    driver.services.store.save(record(phase=RecordPhase.PROVISIONING))
    driver.hold("stray")
    with capture_logs() as logs:
        await reclaim(driver.services)
    told = {entry["event"]: entry for entry in logs}
    assert told["launch failed"]["sandbox_id"] == told["leftover container removed"]["sandbox_id"] == "sb"
    assert "the driver ended" in told["launch failed"]["message"]


@pytest.mark.parametrize("phase", [RecordPhase.PROVISIONING, RecordPhase.FAILED])
async def test_what_is_left_of_a_failed_launch_is_not_taken_for_cleared(
    driver: MemoryDriver, phase: RecordPhase
) -> None:
    services = driver.services
    services.store.save(record(phase=phase))
    driver.hold_volume("supervisor")
    driver.engine.refuse = lambda call, _: EngineRefusedError("no") if call == "remove_volume" else None
    await reclaim(services)
    (sandbox,) = services.table
    assert not sandbox.cleared
    assert sandbox.container_ids == {WORKLOAD, SUPERVISOR}  # the next try names them too


async def test_a_deletion_that_the_disk_refuses_is_left_to_a_look(
    driver: MemoryDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    services = driver.services
    services.store.save(record(phase=RecordPhase.DELETING))
    driver.hold(WORKLOAD)

    def refuse(_folder: Any) -> None:
        raise OSError(16, "Device or resource busy")

    with monkeypatch.context() as busy:
        busy.setattr("shutil.rmtree", refuse)
        await reclaim(services)
    assert driver.engine.containers == {}
    assert [sandbox.record.phase for sandbox in services.table] == [RecordPhase.DELETING]
    await driver.observer().look_at_all()
    await driver.settle()
    assert len(services.table) == 0
    assert not (services.store.directory / "sb").exists()


@pytest.mark.parametrize("container", [WORKLOAD, SUPERVISOR])
async def test_a_container_that_cannot_be_looked_at_keeps_no_driver_from_coming_up(
    driver: MemoryDriver, container: str
) -> None:
    services = driver.services
    services.store.save(record())
    for name in (WORKLOAD, SUPERVISOR):
        driver.hold(name)
    driver.engine.refuse = lambda call, about: (
        EngineRefusedError("driver failed") if (call, about) == ("inspect_container", container) else None
    )
    await reclaim(services)
    assert [sandbox.record for sandbox in services.table] == [record()]
    driver.engine.refuse = lambda *_: None
    await driver.observer().look_at_all()
    (sandbox,) = services.table
    assert sandbox.workload is not None
    assert sandbox.record.failure is None


async def test_a_supervisor_that_was_paused_while_no_driver_ran_is_told_as_paused(driver: MemoryDriver) -> None:
    services = driver.services
    services.store.save(record())
    driver.hold(WORKLOAD)
    driver.hold(SUPERVISOR, status=ContainerStatus.PAUSED)
    await reclaim(services)
    (sandbox,) = services.table
    assert services.snapshot(sandbox).conditions[0].reason == "ContainerPaused"


async def test_a_twin_never_stands_in_for_the_recorded_container(driver: MemoryDriver) -> None:
    services = driver.services
    services.store.save(record())
    driver.hold(SUPERVISOR)
    driver.hold("twin")  # it runs, it is newer, and it carries every label
    await reclaim(services)
    assert set(driver.engine.containers) == {SUPERVISOR}
    (sandbox,) = services.table
    assert (sandbox.workload, sandbox.record.workload_id) == (None, WORKLOAD)
