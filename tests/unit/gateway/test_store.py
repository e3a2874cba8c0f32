from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import sqlalchemy as sa

from gateway_embedded.background import BackgroundTasks
from gateway_embedded.database import Database
from gateway_embedded.errors import (
    ConfigurationError,
    ConflictError,
    SandboxExistsError,
    SandboxNotFoundError,
    StoreError,
)
from gateway_embedded.events import EventHub
from gateway_embedded.sandboxes import (
    Admission,
    AdmissionState,
    Condition,
    ConfigurationVersion,
    DriverSnapshot,
    Launch,
    Phase,
    PlatformEvent,
    PolicyRevision,
    PolicyState,
    Provisioning,
    ResolvedIdentity,
    SandboxRecord,
    SandboxStatus,
)
from gateway_embedded.sessions import SessionRegistry
from gateway_embedded.states import SandboxStates
from gateway_embedded.store import KEPT_EVENTS, SandboxStore
from openshell.status import StatusCode

NOW = datetime(2026, 10, 1, 12, 0, 0, 123456, tzinfo=UTC)


def record(name: str = "alpha", *, workspace: str = "default", created_at: datetime = NOW) -> SandboxRecord:
    ready = Condition(type="Ready", status="False", reason="Starting", message="…", transition_time=NOW)
    snapshot = DriverSnapshot(
        sandbox_id="x", name=name, conditions=(ready,), identity=ResolvedIdentity(uid=1, gid=2), deleting=True
    )
    configuration = ConfigurationVersion(
        policy_version=1, policy_hash="h", config_revision=2**63 - 1, provider_env_revision=1
    )
    return SandboxRecord(
        id=str(uuid.uuid4()),
        name=name,
        workspace=workspace,
        created_at=created_at,
        spec=b"\x00\xff spec",
        launch=Launch(generation="g", session_id="s", session_rotation=1, auth_epoch=1),
        status=SandboxStatus(
            phase=Phase.PROVISIONING,
            conditions=(ready,),
            snapshot=snapshot,
            exit_code=0,
            admission=Admission(instance_id="i", state=AdmissionState.ACCEPTED, configuration=configuration),
        ),
        provisioning=Provisioning(attempt_id="a", preparation_deadline=NOW),
        labels={"team": "blue"},
        annotations={"note": "ünïcode"},
    )


def policy(sandbox_id: str, version: int) -> PolicyRevision:
    return PolicyRevision(
        sandbox_id=sandbox_id,
        version=version,
        policy=b"policy",
        policy_hash=f"hash-{version}",
        state=PolicyState.PENDING,
        created_at=NOW,
    )


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    opened = Database(f"sqlite:///{tmp_path / 'state.sqlite3'}")
    await opened.open()
    yield opened
    await opened.close()


@pytest.fixture
def store(database: Database) -> SandboxStore:
    return SandboxStore(database)


async def test_a_record_comes_back_as_it_was_stored(store: SandboxStore, tmp_path: Path) -> None:
    stored = await store.insert(record(), policy("x", 1))
    assert stored.resource_version == 1
    assert await store.get(stored.id) == stored
    assert await store.find("default", "alpha") == stored
    another = Database(f"sqlite:///{tmp_path / 'state.sqlite3'}")
    await another.open()
    assert await SandboxStore(another).get(stored.id) == stored
    await another.close()


async def test_names_are_unique_in_a_workspace(store: SandboxStore) -> None:
    await store.insert(record(), None)
    await store.insert(record(workspace="other"), None)
    with pytest.raises(SandboxExistsError, match="'alpha'"):
        await store.insert(record(), None)


async def test_a_change_based_on_an_old_version_is_refused(store: SandboxStore) -> None:
    first = await store.insert(record(), None)
    second = await store.replace(first.with_status(phase=Phase.READY))
    assert second.resource_version == 2
    with pytest.raises(ConflictError) as caught:
        await store.replace(first.with_status(phase=Phase.ERROR))
    assert caught.value.facts == {"recovery": "REFRESH_STATE", "current_resource_version": "2"}
    assert await store.get(first.id) == second
    await store.remove(first.id)
    with pytest.raises(SandboxNotFoundError):
        await store.replace(second)


async def test_no_concurrent_change_is_lost(store: SandboxStore) -> None:
    states = SandboxStates(store, EventHub(), SessionRegistry(), BackgroundTasks(), clock=lambda: NOW)
    stored = await states.add(record(), None)

    def count(found: SandboxRecord) -> SandboxRecord:
        return found.with_status(config_revision=found.status.config_revision + 1)

    await asyncio.gather(*(states.change(stored.id, count) for _ in range(8)))
    found = await store.get(stored.id)
    assert found is not None
    assert (found.status.config_revision, found.resource_version) == (9, 9)


async def test_a_cancelled_caller_keeps_no_stored_change_from_the_watchers(store: SandboxStore) -> None:
    hub, tasks = EventHub(), BackgroundTasks()
    states = SandboxStates(store, hub, SessionRegistry(), tasks, clock=lambda: NOW)
    stored = await states.add(record(), None)
    with hub.subscribe(stored.id) as reader:
        decided = asyncio.Event()

        def decide(found: SandboxRecord) -> SandboxRecord:
            decided.set()
            return found.with_status(phase=Phase.READY)

        caller = asyncio.create_task(states.change(stored.id, decide))
        await decided.wait()
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        item = await asyncio.wait_for(reader.get(), 10)
    assert item is not None
    assert item.content == await store.get(stored.id)
    await tasks.settle()


async def test_a_decision_that_changes_nothing_writes_nothing(store: SandboxStore) -> None:
    states = SandboxStates(store, EventHub(), SessionRegistry(), BackgroundTasks(), clock=lambda: NOW)
    stored = await states.add(record(), None)
    assert await states.change(stored.id, lambda found: found) == stored
    assert await states.change(stored.id, lambda _: None) == stored
    assert await states.change_if_stored("unknown", lambda found: found) is None


async def test_removal_takes_policies_and_events_along(store: SandboxStore) -> None:
    stored = await store.insert(record(), None)
    await store.add_policy(policy(stored.id, 1))
    await store.keep_event(stored.id, PlatformEvent(source="d", type="Warning", reason="r", message="m"))
    assert await store.remove(stored.id)
    assert not await store.remove(stored.id)
    assert await store.policies(stored.id) == []
    assert await store.kept_events() == []


async def test_a_loaded_policy_supersedes_older_ones(store: SandboxStore) -> None:
    stored = await store.insert(record(), None)
    for version in (1, 2, 3):
        await store.add_policy(policy(stored.id, version))
    with pytest.raises(ConflictError):
        await store.add_policy(policy(stored.id, 3))
    states = [revision.state for revision in await store.policies(stored.id)]
    assert states == [PolicyState.SUPERSEDED, PolicyState.SUPERSEDED, PolicyState.PENDING]
    assert await store.set_policy_state(stored.id, 3, PolicyState.LOADED, load_error="", now=NOW)
    assert await store.set_policy_state(stored.id, 2, PolicyState.FAILED, load_error="bad", now=NOW)
    assert not await store.set_policy_state(stored.id, 9, PolicyState.LOADED, load_error="", now=NOW)
    one, two, three = await store.policies(stored.id)
    assert (one.state, two.state, two.load_error) == (PolicyState.SUPERSEDED, PolicyState.FAILED, "bad")
    assert (three.state, three.loaded_at, three.policy) == (PolicyState.LOADED, NOW, b"policy")


async def test_only_the_newest_events_of_a_sandbox_are_kept(store: SandboxStore) -> None:
    first, second = await store.insert(record(), None), await store.insert(record("beta"), None)
    for number in range(KEPT_EVENTS + 3):
        event = PlatformEvent(source="d", type="Warning", reason=str(number), message="m", metadata={"k": "v"})
        assert await store.keep_event(first.id, event)
    last = PlatformEvent(source="d", type="Warning", reason="b", message="m", event_time=NOW)
    assert await store.keep_event(second.id, last)
    kept = await store.kept_events()
    assert [event.reason for owner, event in kept if owner == first.id] == [
        str(number) for number in range(3, KEPT_EVENTS + 3)
    ]
    assert kept[-1] == (second.id, last)


async def test_no_event_is_kept_of_a_sandbox_that_is_gone(store: SandboxStore, tmp_path: Path) -> None:
    stored = await store.insert(record(), None)
    event = PlatformEvent(source="d", type="Warning", reason="r", message="m")
    assert await store.keep_event(stored.id, event)
    await store.remove(stored.id)
    assert not await store.keep_event(stored.id, event)
    assert await store.kept_events() == []
    # Nor is one that an earlier version left.
    connection = sqlite3.connect(tmp_path / "state.sqlite3")
    connection.execute("INSERT INTO platform_events (sandbox_id, event) VALUES ('gone', '{}')")
    connection.commit()
    connection.close()
    again = Database(f"sqlite:///{tmp_path / 'state.sqlite3'}")
    await again.open()
    assert await SandboxStore(again).kept_events() == []
    await again.close()


async def test_a_setting_is_chosen_once(database: Database) -> None:
    assert await database.setting("gateway_id", lambda: "first") == "first"
    assert await database.setting("gateway_id", lambda: "second") == "first"


async def test_a_database_that_fails_says_so_without_the_values(database: Database, store: SandboxStore) -> None:
    await store.insert(record(), None)
    await database.run(lambda db: db.exec_driver_sql("DROP TABLE policy_revisions").close())
    with pytest.raises(StoreError, match="no such table") as caught:
        await store.add_policy(policy("x", 1))
    assert (caught.value.status, caught.value.retryable) == (StatusCode.UNAVAILABLE, True)
    assert "INSERT" not in str(caught.value)


async def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"not a database" * 100)
    database = Database(f"sqlite:///{tmp_path / 'other'}")
    with pytest.raises(StoreError, match="not a database"):
        await database.open()
    await database.close()


async def test_a_database_of_another_version_is_refused(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'state.sqlite3'}"
    database = Database(url)
    await database.open()
    await database.close()
    connection = sqlite3.connect(tmp_path / "state.sqlite3")
    connection.execute("UPDATE gateway SET value = '999' WHERE key = 'schema_version'")
    connection.commit()
    connection.close()
    database = Database(url)
    with pytest.raises(ConfigurationError, match="999"):
        await database.open()
    await database.close()


async def test_whole_replies_of_an_earlier_release_are_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite3"
    database = Database(f"sqlite:///{path}")
    await database.open()
    await database.close()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE replies (request_id TEXT PRIMARY KEY, reply BLOB)")
        connection.execute("INSERT INTO replies VALUES ('r', 'TOKEN=secret')")
        connection.commit()
    assert b"TOKEN=secret" in path.read_bytes()
    database = Database(f"sqlite:///{path}")
    await database.open()
    await database.close()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT name FROM sqlite_master WHERE name = 'replies'").fetchall() == []
    assert b"TOKEN=secret" not in path.read_bytes()


@pytest.mark.parametrize("kind", [sa.exc.IntegrityError, sa.exc.DataError])
async def test_a_database_that_quotes_the_row_it_refuses_is_not_quoted(
    database: Database, kind: type[sa.exc.DBAPIError]
) -> None:
    def work(_: sa.Connection) -> None:
        raise kind("INSERT ...", None, Exception("DETAIL: Failing row contains (id, TOKEN=secret)"))

    with pytest.raises(StoreError, match=kind.__name__) as caught:
        await database.run(work)
    assert "secret" not in str(caught.value)


def test_a_record_does_not_print_its_spec() -> None:
    assert "spec" not in repr(replace(record(), spec=b"TOKEN=secret"))
