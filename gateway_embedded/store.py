"""The gateway's state in one SQL database; SQLite by default, the URL decides.

Every change of a sandbox is compare-and-set on its resource version. All statements run in one worker thread, so the
event loop never waits for a disk; each method is one transaction, so a killed process leaves a consistent file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from gateway_embedded import records
from gateway_embedded.errors import ConfigurationError, ConflictError, SandboxExistsError, SandboxNotFoundError
from gateway_embedded.sandboxes import PlatformEvent, PolicyRevision, PolicyState, SandboxRecord

SCHEMA_VERSION = "1"
"""Version of the tables; a database of another version is refused."""

KEPT_EVENTS = 64
"""How many warnings of one sandbox outlive the process."""

_T = TypeVar("_T")

_metadata = sa.MetaData()
_gateway = sa.Table(
    "gateway",
    _metadata,
    sa.Column("key", sa.String(64), primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
)
_sandboxes = sa.Table(
    "sandboxes",
    _metadata,
    sa.Column("id", sa.String(36), primary_key=True),
    sa.Column("workspace", sa.String(63), nullable=False),
    sa.Column("name", sa.String(63), nullable=False),
    sa.Column("created_us", sa.BigInteger, nullable=False),
    sa.Column("resource_version", sa.BigInteger, nullable=False),
    sa.Column("spec", sa.LargeBinary, nullable=False),
    sa.Column("record", sa.Text, nullable=False),
    sa.UniqueConstraint("workspace", "name"),
    sa.Index("sandboxes_by_age", "created_us", "id"),
)
_policies = sa.Table(
    "policy_revisions",
    _metadata,
    sa.Column("sandbox_id", sa.String(36), primary_key=True),
    sa.Column("version", sa.Integer, primary_key=True),
    sa.Column("policy", sa.LargeBinary, nullable=False),
    sa.Column("revision", sa.Text, nullable=False),
)
_events = sa.Table(
    "platform_events",
    _metadata,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("sandbox_id", sa.String(36), nullable=False, index=True),
    sa.Column("event", sa.Text, nullable=False),
)
_replies = sa.Table(
    "replies",
    _metadata,
    sa.Column("request_id", sa.String(36), primary_key=True),
    sa.Column("method", sa.String(64), primary_key=True),
    sa.Column("workspace", sa.String(63), primary_key=True),
    sa.Column("payload_sha256", sa.String(64), nullable=False),
    sa.Column("answered_us", sa.BigInteger, nullable=False),
    sa.Column("reply", sa.LargeBinary, nullable=False),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredReply:
    """The reply of a request that named a request id."""

    payload_sha256: str
    reply: bytes


@dataclass(frozen=True, slots=True, order=True)
class PagePosition:
    """Where a page of sandboxes ended: age first, id to tell equals apart."""

    created_us: int
    id: str


class SandboxStore:
    """All durable state of one gateway. Open it with `open`, end it with `close`."""

    def __init__(self, url: str) -> None:
        self._engine = sa.create_engine(url)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gateway-store")

    async def open(self) -> None:
        """Create or check the tables.

        Raises:
            ConfigurationError: The database belongs to another version of the gateway.
        """
        await self._run(self._prepare)

    async def close(self) -> None:
        """Finish what is queued and let go of the database."""
        await self._run(lambda _: None)
        await asyncio.get_running_loop().run_in_executor(self._thread, self._engine.dispose)
        self._thread.shutdown()

    async def setting(self, key: str, default: Callable[[], str]) -> str:
        """A value that is chosen once and then kept, for example the gateway's id."""

        def work(db: sa.Connection) -> str:
            found = db.execute(sa.select(_gateway.c.value).where(_gateway.c.key == key)).scalar_one_or_none()
            if found is not None:
                return str(found)
            value = default()
            db.execute(sa.insert(_gateway).values(key=key, value=value))
            return value

        return await self._run(work)

    async def insert(self, record: SandboxRecord, policy: PolicyRevision | None) -> SandboxRecord:
        """Store a new sandbox, with the policy it starts with, at resource version 1.

        Raises:
            SandboxExistsError: The workspace has a sandbox of that name.
        """
        stored = replace(record, resource_version=1)

        def work(db: sa.Connection) -> SandboxRecord:
            db.execute(sa.insert(_sandboxes).values(id=stored.id, spec=stored.spec, **_row(stored)))
            if policy is not None:
                db.execute(sa.insert(_policies).values(**_policy_row(policy)))
            return stored

        try:
            return await self._run(work)
        except IntegrityError as error:
            raise SandboxExistsError(
                f"a sandbox named {record.name!r} exists in workspace {record.workspace!r}; "
                "delete it or choose another name"
            ) from error

    async def get(self, sandbox_id: str) -> SandboxRecord | None:
        """The sandbox with that id."""
        return await self._one(_sandboxes.c.id == sandbox_id)

    async def find(self, workspace: str, name: str) -> SandboxRecord | None:
        """The sandbox of that name in the workspace."""
        return await self._one(sa.and_(_sandboxes.c.workspace == workspace, _sandboxes.c.name == name))

    async def all(self) -> Sequence[SandboxRecord]:
        """Every stored sandbox, oldest first."""
        return await self.page(workspace=None, after=None, limit=None)

    async def page(
        self, *, workspace: str | None, after: PagePosition | None, limit: int | None
    ) -> Sequence[SandboxRecord]:
        """Sandboxes behind a position, oldest first; of every workspace when none is named."""
        query = sa.select(_sandboxes).order_by(_sandboxes.c.created_us, _sandboxes.c.id)
        if workspace is not None:
            query = query.where(_sandboxes.c.workspace == workspace)
        if after is not None:
            later = sa.tuple_(_sandboxes.c.created_us, _sandboxes.c.id) > sa.tuple_(after.created_us, after.id)
            query = query.where(later)
        if limit is not None:
            query = query.limit(limit)
        return await self._run(lambda db: [_record(row) for row in db.execute(query)])

    async def replace(self, record: SandboxRecord) -> SandboxRecord:
        """Store `record` if nobody changed the sandbox since it was read; returns it with its new version.

        Raises:
            ConflictError: The stored resource version is another one.
            SandboxNotFoundError: The sandbox is gone.
        """
        stored = replace(record, resource_version=record.resource_version + 1)

        def work(db: sa.Connection) -> SandboxRecord:
            update = (
                sa.update(_sandboxes)
                .where(_sandboxes.c.id == record.id, _sandboxes.c.resource_version == record.resource_version)
                .values(**_row(stored))
            )
            if db.execute(update).rowcount == 1:
                return stored
            version = db.execute(
                sa.select(_sandboxes.c.resource_version).where(_sandboxes.c.id == record.id)
            ).scalar_one_or_none()
            if version is None:
                raise SandboxNotFoundError(f"sandbox {record.name!r} was deleted meanwhile")
            raise ConflictError(
                f"sandbox {record.name!r} changed meanwhile; read it again and repeat",
                facts={"recovery": "REFRESH_STATE", "current_resource_version": str(version)},
            )

        return await self._run(work)

    async def remove(self, sandbox_id: str) -> bool:
        """Erase a sandbox with its policies and events; false when there was none."""

        def work(db: sa.Connection) -> bool:
            db.execute(sa.delete(_policies).where(_policies.c.sandbox_id == sandbox_id))
            db.execute(sa.delete(_events).where(_events.c.sandbox_id == sandbox_id))
            return db.execute(sa.delete(_sandboxes).where(_sandboxes.c.id == sandbox_id)).rowcount == 1

        return await self._run(work)

    async def policies(self, sandbox_id: str) -> Sequence[PolicyRevision]:
        """All policy revisions of a sandbox, oldest first."""
        query = sa.select(_policies).where(_policies.c.sandbox_id == sandbox_id).order_by(_policies.c.version)
        return await self._run(lambda db: [_policy(row) for row in db.execute(query)])

    async def add_policy(self, revision: PolicyRevision) -> None:
        """Store a new policy revision; older ones that were never loaded become superseded.

        Raises:
            ConflictError: The version exists already.
        """

        def work(db: sa.Connection) -> None:
            db.execute(sa.insert(_policies).values(**_policy_row(revision)))
            _supersede(db, revision.sandbox_id, before=revision.version, states=(PolicyState.PENDING,))

        try:
            await self._run(work)
        except IntegrityError as error:
            raise ConflictError(
                f"policy version {revision.version} of sandbox {revision.sandbox_id} was stored meanwhile"
            ) from error

    async def set_policy_state(
        self, sandbox_id: str, version: int, state: PolicyState, *, load_error: str, now: datetime
    ) -> bool:
        """Record what a supervisor made of a policy revision; false when there is no such revision."""

        def work(db: sa.Connection) -> bool:
            query = sa.select(_policies).where(_policies.c.sandbox_id == sandbox_id, _policies.c.version == version)
            row = db.execute(query).one_or_none()
            if row is None:
                return False
            before = _policy(row)
            loaded_at = now if state is PolicyState.LOADED else before.loaded_at
            _store_policy(db, replace(before, state=state, load_error=load_error, loaded_at=loaded_at))
            if state is PolicyState.LOADED:
                _supersede(db, sandbox_id, before=version, states=(PolicyState.PENDING, PolicyState.LOADED))
            return True

        return await self._run(work)

    async def keep_event(self, sandbox_id: str, event: PlatformEvent) -> None:
        """Store an event that must survive the process; only the newest `KEPT_EVENTS` of a sandbox stay."""

        def work(db: sa.Connection) -> None:
            db.execute(sa.insert(_events).values(sandbox_id=sandbox_id, event=records.dump_event(event)))
            kept = (
                sa.select(_events.c.number)
                .where(_events.c.sandbox_id == sandbox_id)
                .order_by(_events.c.number.desc())
                .limit(KEPT_EVENTS)
            )
            oldest = min(db.execute(kept).scalars())
            db.execute(sa.delete(_events).where(_events.c.sandbox_id == sandbox_id, _events.c.number < oldest))

        await self._run(work)

    async def kept_events(self) -> Sequence[tuple[str, PlatformEvent]]:
        """All stored events with the id of their sandbox, oldest first."""
        query = sa.select(_events).order_by(_events.c.number)
        return await self._run(
            lambda db: [(row.sandbox_id, records.load_event(row.event)) for row in db.execute(query)]
        )

    async def reply(self, request_id: str, method: str, workspace: str) -> StoredReply | None:
        """The stored reply to a request id, if there is one."""
        query = sa.select(_replies).where(
            _replies.c.request_id == request_id, _replies.c.method == method, _replies.c.workspace == workspace
        )

        def work(db: sa.Connection) -> StoredReply | None:
            row = db.execute(query).one_or_none()
            return None if row is None else StoredReply(payload_sha256=row.payload_sha256, reply=row.reply)

        return await self._run(work)

    async def keep_reply(
        self, request_id: str, method: str, workspace: str, reply: StoredReply, *, now: datetime, lifetime: timedelta
    ) -> None:
        """Store a reply and drop those older than `lifetime`."""

        def work(db: sa.Connection) -> None:
            db.execute(sa.delete(_replies).where(_replies.c.answered_us < _micros(now - lifetime)))
            db.execute(
                sa.insert(_replies).values(
                    request_id=request_id,
                    method=method,
                    workspace=workspace,
                    payload_sha256=reply.payload_sha256,
                    answered_us=_micros(now),
                    reply=reply.reply,
                )
            )

        await self._run(work)

    def _prepare(self, db: sa.Connection) -> None:
        if db.dialect.name == "sqlite":
            db.exec_driver_sql("PRAGMA journal_mode=WAL")
        _metadata.create_all(db)
        query = sa.select(_gateway.c.value).where(_gateway.c.key == "schema_version")
        version = db.execute(query).scalar_one_or_none()
        if version is None:
            db.execute(sa.insert(_gateway).values(key="schema_version", value=SCHEMA_VERSION))
        elif version != SCHEMA_VERSION:
            raise ConfigurationError(
                f"the state is of version {version}, this gateway reads version {SCHEMA_VERSION}; "
                "use a new state folder or the gateway that wrote it"
            )

    async def _one(self, where: sa.ColumnElement[bool]) -> SandboxRecord | None:
        def work(db: sa.Connection) -> SandboxRecord | None:
            row = db.execute(sa.select(_sandboxes).where(where)).one_or_none()
            return None if row is None else _record(row)

        return await self._run(work)

    async def _run(self, work: Callable[[sa.Connection], _T]) -> _T:
        def transact() -> _T:
            with self._engine.begin() as db:
                return work(db)

        future = asyncio.get_running_loop().run_in_executor(self._thread, transact)
        # A cancelled caller must not leave its statement half-awaited: the transaction ends before the caller does.
        return await asyncio.shield(future)


def position(record: SandboxRecord) -> PagePosition:
    """Where a page that ends with this record ends."""
    return PagePosition(_micros(record.created_at), record.id)


def _micros(moment: datetime) -> int:
    return (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


def _row(record: SandboxRecord) -> dict[str, Any]:
    return {
        "workspace": record.workspace,
        "name": record.name,
        "created_us": _micros(record.created_at),
        "resource_version": record.resource_version,
        "record": records.dump_record(record),
    }


def _record(row: sa.Row[Any]) -> SandboxRecord:
    return replace(records.load_record(row.record), spec=row.spec, resource_version=row.resource_version)


def _policy_row(revision: PolicyRevision) -> dict[str, Any]:
    return {
        "sandbox_id": revision.sandbox_id,
        "version": revision.version,
        "policy": revision.policy,
        "revision": records.dump_revision(revision),
    }


def _policy(row: sa.Row[Any]) -> PolicyRevision:
    return replace(records.load_revision(row.revision), policy=row.policy)


def _store_policy(db: sa.Connection, revision: PolicyRevision) -> None:
    db.execute(
        sa.update(_policies)
        .where(_policies.c.sandbox_id == revision.sandbox_id, _policies.c.version == revision.version)
        .values(revision=records.dump_revision(revision))
    )


def _supersede(db: sa.Connection, sandbox_id: str, *, before: int, states: Sequence[PolicyState]) -> None:
    query = sa.select(_policies).where(_policies.c.sandbox_id == sandbox_id, _policies.c.version < before)
    for revision in [_policy(row) for row in db.execute(query)]:
        if revision.state in states:
            _store_policy(db, replace(revision, state=PolicyState.SUPERSEDED))
