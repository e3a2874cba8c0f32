"""Sandboxes, their policies and their events in the gateway's database.

Every change of a sandbox is compare-and-set on its resource version.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from gateway_embedded import records
from gateway_embedded.database import Database
from gateway_embedded.errors import ConflictError, SandboxExistsError, SandboxNotFoundError
from gateway_embedded.sandboxes import PlatformEvent, PolicyRevision, PolicyState, SandboxRecord
from gateway_embedded.tables import EVENTS, POLICIES, REQUESTS, SANDBOXES, micros

KEPT_EVENTS = 64
"""How many warnings of one sandbox outlive the process."""


@dataclass(frozen=True, slots=True, order=True)
class PagePosition:
    """Where a page of sandboxes ended: age first, id to tell equals apart."""

    created_us: int
    id: str


class SandboxStore:
    """The sandboxes of one gateway, with their policies and events."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def insert(self, record: SandboxRecord, policy: PolicyRevision | None) -> SandboxRecord:
        """Store a new sandbox, with the policy it starts with, at resource version 1.

        Raises:
            SandboxExistsError: The workspace has a sandbox of that name.
        """
        stored = replace(record, resource_version=1)

        def work(db: sa.Connection) -> SandboxRecord:
            db.execute(sa.insert(SANDBOXES).values(id=stored.id, spec=stored.spec, **_row(stored)))
            if policy is not None:
                db.execute(sa.insert(POLICIES).values(**_policy_row(policy)))
            return stored

        taken = SandboxExistsError(
            f"a sandbox named {record.name!r} exists in workspace {record.workspace!r}; "
            "delete it or choose another name"
        )
        return await self._database.run(work, conflict=taken)

    async def get(self, sandbox_id: str) -> SandboxRecord | None:
        """The sandbox with that id."""
        return await self._one(SANDBOXES.c.id == sandbox_id)

    async def find(self, workspace: str, name: str) -> SandboxRecord | None:
        """The sandbox of that name in the workspace."""
        return await self._one(sa.and_(SANDBOXES.c.workspace == workspace, SANDBOXES.c.name == name))

    async def all(self) -> Sequence[SandboxRecord]:
        """Every stored sandbox, oldest first."""
        return await self.page(workspace=None, after=None, limit=None)

    async def page(
        self, *, workspace: str | None, after: PagePosition | None, limit: int | None
    ) -> Sequence[SandboxRecord]:
        """Sandboxes behind a position, oldest first; of every workspace when none is named."""
        query = sa.select(SANDBOXES).order_by(SANDBOXES.c.created_us, SANDBOXES.c.id)
        if workspace is not None:
            query = query.where(SANDBOXES.c.workspace == workspace)
        if after is not None:
            later = sa.tuple_(SANDBOXES.c.created_us, SANDBOXES.c.id) > sa.tuple_(after.created_us, after.id)
            query = query.where(later)
        if limit is not None:
            query = query.limit(limit)
        return await self._database.run(lambda db: [_record(row) for row in db.execute(query)])

    async def replace(self, record: SandboxRecord) -> SandboxRecord:
        """Store `record` if nobody changed the sandbox since it was read; returns it with its new version.

        Raises:
            ConflictError: The stored resource version is another one.
            SandboxNotFoundError: The sandbox is gone.
        """
        stored = replace(record, resource_version=record.resource_version + 1)

        def work(db: sa.Connection) -> SandboxRecord:
            update = (
                sa.update(SANDBOXES)
                .where(SANDBOXES.c.id == record.id, SANDBOXES.c.resource_version == record.resource_version)
                .values(**_row(stored))
            )
            if db.execute(update).rowcount == 1:
                return stored
            version = db.execute(
                sa.select(SANDBOXES.c.resource_version).where(SANDBOXES.c.id == record.id)
            ).scalar_one_or_none()
            if version is None:
                raise SandboxNotFoundError(f"sandbox {record.name!r} was deleted meanwhile")
            raise ConflictError(
                f"sandbox {record.name!r} changed meanwhile; read it again and repeat",
                facts={"recovery": "REFRESH_STATE", "current_resource_version": str(version)},
            )

        return await self._database.run(work)

    async def remove(self, sandbox_id: str) -> bool:
        """Erase a sandbox with its policies, events and its supervisor's requests; false when there was none."""

        def work(db: sa.Connection) -> bool:
            db.execute(sa.delete(POLICIES).where(POLICIES.c.sandbox_id == sandbox_id))
            db.execute(sa.delete(EVENTS).where(EVENTS.c.sandbox_id == sandbox_id))
            db.execute(sa.delete(REQUESTS).where(REQUESTS.c.caller == sandbox_id))
            return db.execute(sa.delete(SANDBOXES).where(SANDBOXES.c.id == sandbox_id)).rowcount == 1

        return await self._database.run(work)

    async def policies(self, sandbox_id: str) -> Sequence[PolicyRevision]:
        """All policy revisions of a sandbox, oldest first."""
        query = sa.select(POLICIES).where(POLICIES.c.sandbox_id == sandbox_id).order_by(POLICIES.c.version)
        return await self._database.run(lambda db: [_policy(row) for row in db.execute(query)])

    async def add_policy(self, revision: PolicyRevision) -> None:
        """Store a new policy revision; older ones that were never loaded become superseded.

        Raises:
            ConflictError: The version exists already.
        """

        def work(db: sa.Connection) -> None:
            db.execute(sa.insert(POLICIES).values(**_policy_row(revision)))
            _supersede(db, revision.sandbox_id, before=revision.version, states=(PolicyState.PENDING,))

        stored = ConflictError(
            f"policy version {revision.version} of sandbox {revision.sandbox_id} was stored meanwhile"
        )
        await self._database.run(work, conflict=stored)

    async def set_policy_state(
        self, sandbox_id: str, version: int, state: PolicyState, *, load_error: str, now: datetime
    ) -> bool:
        """Record what a supervisor made of a policy revision; false when there is no such revision."""

        def work(db: sa.Connection) -> bool:
            query = sa.select(POLICIES).where(POLICIES.c.sandbox_id == sandbox_id, POLICIES.c.version == version)
            row = db.execute(query).one_or_none()
            if row is None:
                return False
            before = _policy(row)
            loaded_at = now if state is PolicyState.LOADED else before.loaded_at
            _store_policy(db, replace(before, state=state, load_error=load_error, loaded_at=loaded_at))
            if state is PolicyState.LOADED:
                _supersede(db, sandbox_id, before=version, states=(PolicyState.PENDING, PolicyState.LOADED))
            return True

        return await self._database.run(work)

    async def keep_event(self, sandbox_id: str, event: PlatformEvent) -> bool:
        """Store an event that must survive the process; false when there is no such sandbox (any more).

        Only the newest `KEPT_EVENTS` of a sandbox stay.
        """
        owner = sa.select(SANDBOXES.c.id).where(SANDBOXES.c.id == sandbox_id)

        def work(db: sa.Connection) -> bool:
            if db.execute(owner).one_or_none() is None:
                return False
            db.execute(sa.insert(EVENTS).values(sandbox_id=sandbox_id, event=records.dump_event(event)))
            kept = (
                sa.select(EVENTS.c.number)
                .where(EVENTS.c.sandbox_id == sandbox_id)
                .order_by(EVENTS.c.number.desc())
                .limit(KEPT_EVENTS)
            )
            oldest = min(db.execute(kept).scalars())
            db.execute(sa.delete(EVENTS).where(EVENTS.c.sandbox_id == sandbox_id, EVENTS.c.number < oldest))
            return True

        return await self._database.run(work)

    async def kept_events(self) -> Sequence[tuple[str, PlatformEvent]]:
        """All stored events with the id of their sandbox, oldest first."""
        query = sa.select(EVENTS).order_by(EVENTS.c.number)
        return await self._database.run(
            lambda db: [(row.sandbox_id, records.load_event(row.event)) for row in db.execute(query)]
        )

    async def _one(self, where: sa.ColumnElement[bool]) -> SandboxRecord | None:
        def work(db: sa.Connection) -> SandboxRecord | None:
            row = db.execute(sa.select(SANDBOXES).where(where)).one_or_none()
            return None if row is None else _record(row)

        return await self._database.run(work)


def position(record: SandboxRecord) -> PagePosition:
    """Where a page that ends with this record ends."""
    return PagePosition(micros(record.created_at), record.id)


def _row(record: SandboxRecord) -> dict[str, Any]:
    return {
        "workspace": record.workspace,
        "name": record.name,
        "created_us": micros(record.created_at),
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
        sa.update(POLICIES)
        .where(POLICIES.c.sandbox_id == revision.sandbox_id, POLICIES.c.version == revision.version)
        .values(revision=records.dump_revision(revision))
    )


def _supersede(db: sa.Connection, sandbox_id: str, *, before: int, states: Sequence[PolicyState]) -> None:
    query = sa.select(POLICIES).where(POLICIES.c.sandbox_id == sandbox_id, POLICIES.c.version < before)
    for revision in [_policy(row) for row in db.execute(query)]:
        if revision.state in states:
            _store_policy(db, replace(revision, state=PolicyState.SUPERSEDED))
