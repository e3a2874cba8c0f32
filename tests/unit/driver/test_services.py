"""Writes of one sandbox: in order, none for a sandbox that is gone, none lost to a disk that refuses once."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import contextmanager
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from driver_docker.errors import RecordError
from driver_docker.labels import Owner
from driver_docker.records import AUTH_FILE, RECORD_FILE, RecordStore
from driver_docker.sandbox_record import RecordPhase, SandboxRecord
from driver_docker.sandboxes import SandboxTable
from driver_docker.services import Services
from openshell.verdicts import Component, Verdict, VerdictKind

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from driver_docker.sandboxes import Sandbox

NOW = datetime(2026, 10, 5, tzinfo=UTC)
VERDICT = Verdict(kind=VerdictKind.EXITED, reason="ContainerExited", component=Component.WORKLOAD, exit_code=7)

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    nothing = cast("Any", SimpleNamespace())
    made = Services(
        engine=nothing,
        config=nothing,
        owner=Owner(namespace="n", driver="d"),
        store=RecordStore(tmp_path / "n"),
        table=SandboxTable(),
        handshake=nothing,
        gate=nothing,
        publish=lambda _: None,
    )
    made.store.open()
    yield made
    made.disk.close()


def _record(phase: RecordPhase = RecordPhase.PROVISIONING) -> SandboxRecord:
    return SandboxRecord(sandbox_id="sb-1", name="n", workspace="w", phase=phase, changed_at=NOW)


@contextmanager
def _slow(monkeypatch: pytest.MonkeyPatch, store: RecordStore, method: str) -> Iterator[tuple[asyncio.Event, Any]]:
    """Keep the calls of one method back; tells when the first has come."""
    loop, reached, go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    real = getattr(store, method)

    def slow(*args: Any, **kwargs: Any) -> Any:
        loop.call_soon_threadsafe(reached.set)
        if not go_on.wait(10):
            raise AssertionError(f"the {method} that was kept back was never let go on")
        return real(*args, **kwargs)

    monkeypatch.setattr(store, method, slow)
    try:
        yield reached, go_on.set
    finally:
        go_on.set()


def _recorded(services: Services) -> str:
    return str(json.loads((_folder(services) / RECORD_FILE).read_bytes())["phase"])


def _folder(services: Services) -> Path:
    return services.store.directory / "sb-1"


async def _each_write(services: Services, sandbox: Sandbox) -> None:
    await services.save(sandbox)
    await services.save_quietly(sandbox)
    await services.save_files(sandbox, {AUTH_FILE: b"secret"})
    await services.commit_files(sandbox, {AUTH_FILE: b"secret"}, last=AUTH_FILE)
    await services.record_exit(sandbox, VERDICT, "tail")


async def test_nothing_is_written_for_a_sandbox_that_was_deleted(services: Services) -> None:
    sandbox = services.table.add(_record())
    await services.save(sandbox)
    assert await services.remove_record("sb-1")
    assert services.table.by_id("sb-1") is None
    await _each_write(services, sandbox)
    assert not _folder(services).exists()


async def test_the_verdict_of_a_sandbox_that_was_deleted_meanwhile_is_in_the_journal_all_the_same(
    services: Services,
) -> None:
    sandbox = services.table.add(_record())
    services.table.discard(sandbox)
    await services.record_exit(sandbox, VERDICT, "tail")
    assert [entry.sandbox_id for entry in services.journal.read()] == ["sb-1"]


async def test_a_failed_sandbox_writes_nothing_into_the_folder_of_the_one_that_followed_it(services: Services) -> None:
    failed = services.table.add(_record(RecordPhase.FAILED))
    services.table.discard(failed)
    following = services.table.add(_record())
    await services.save(following)
    await _each_write(services, failed)
    await services.remove_files(failed, (AUTH_FILE,))
    assert _recorded(services) == RecordPhase.PROVISIONING
    assert [file.name for file in _folder(services).iterdir()] == [RECORD_FILE]


async def test_a_write_that_waits_while_the_folder_is_removed_comes_to_nothing(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = services.table.add(_record())
    await services.save(sandbox)
    with _slow(monkeypatch, services.store, "remove") as (reached, go_on):
        removal = asyncio.create_task(services.remove_record("sb-1"))
        await reached.wait()
        writes = [asyncio.create_task(_each_write(services, sandbox)), asyncio.create_task(services.save(sandbox))]
        await asyncio.sleep(0)
        go_on()
        assert await removal
        await asyncio.gather(*writes)
    assert not _folder(services).exists()


async def test_a_record_that_the_disk_refused_is_written_at_the_next_look(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = services.table.add(_record())
    await services.save(sandbox)

    def refuse(_: SandboxRecord) -> None:
        raise RecordError("No space left on device")

    with monkeypatch.context() as full:
        full.setattr(services.store, "save", refuse)
        sandbox.record = _record(RecordPhase.ACTIVE)
        await services.save_quietly(sandbox)
        await services.save_unsaved()
        with pytest.raises(RecordError):
            await services.save(sandbox)
    assert _recorded(services) == RecordPhase.PROVISIONING
    await services.save_unsaved()
    assert _recorded(services) == RecordPhase.ACTIVE
    assert not sandbox.unsaved


async def test_an_id_has_one_lock_as_long_as_anybody_has_it(services: Services) -> None:
    table = services.table
    async with table.lock_of("sb-1"):
        failed = table.add(_record(RecordPhase.FAILED))
        assert failed.lock.locked()
        table.discard(failed)
        following = table.add(_record())
        assert following.lock is failed.lock
        assert table.lock_of("sb-2") is not following.lock
    assert not following.lock.locked()
