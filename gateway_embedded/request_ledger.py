"""Requests that named an id, in the database: admitted before their work, settled after it (public-api 2.2)."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

import sqlalchemy as sa

from gateway_embedded.database import Database
from gateway_embedded.errors import TooManyRequestsError
from gateway_embedded.tables import REQUESTS, micros

REPLAY_LIFETIME = timedelta(hours=24)
"""How long a reply is replayed."""

ADMISSIONS_PER_CALLER = 1000
"""Requests of one caller that are remembered at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestKey:
    """What an id is good for: the same one of another caller, method or workspace is another request."""

    caller: str
    """`USERS`, or a sandbox's id for its supervisor."""
    request_id: str
    method: str
    workspace: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """A request that was admitted before; without a reply its outcome is not known."""

    payload_sha256: str
    reply: bytes | None


class RequestLedger:
    """Remembers replies for `REPLAY_LIFETIME`, and requests without a known outcome for ever."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def admit(self, key: RequestKey, payload_sha256: str, *, now: datetime) -> LedgerEntry | None:
        """Admit a request, or return what is known of an earlier one under the same id.

        Raises:
            TooManyRequestsError: Too many of this caller are remembered.
        """
        expired = sa.delete(REQUESTS).where(REQUESTS.c.answered_us < micros(now - REPLAY_LIFETIME))
        count = sa.select(sa.func.count()).select_from(REQUESTS).where(REQUESTS.c.caller == key.caller)

        def work(db: sa.Connection) -> LedgerEntry | None:
            db.execute(expired)
            row = db.execute(sa.select(REQUESTS).where(_is(key))).one_or_none()
            if row is not None:
                return LedgerEntry(payload_sha256=row.payload_sha256, reply=row.reply)
            if db.execute(count).scalar_one() >= ADMISSIONS_PER_CALLER:
                raise TooManyRequestsError(
                    f"{ADMISSIONS_PER_CALLER} requests with a request_id are remembered already, each for 24 hours; "
                    "leave request_id out or wait"
                )
            columns = {
                "caller": key.caller, "request_id": key.request_id, "method": key.method, "workspace": key.workspace
            }  # fmt: skip
            db.execute(sa.insert(REQUESTS).values(payload_sha256=payload_sha256, **columns))
            return None

        return await self._database.run(work)

    async def settle(self, key: RequestKey, reply: bytes, *, now: datetime) -> None:
        """Remember the reply to an admitted request."""
        update = sa.update(REQUESTS).where(_is(key)).values(reply=reply, answered_us=micros(now))
        await self._change(update)

    async def withdraw(self, key: RequestKey) -> None:
        """Forget an admitted request that failed: it may be made again under its id."""
        await self._change(sa.delete(REQUESTS).where(_is(key)))

    async def _change(self, statement: sa.Executable) -> None:
        def work(db: sa.Connection) -> None:
            db.execute(statement)

        await self._database.run(work)


def _is(key: RequestKey) -> sa.ColumnElement[bool]:
    return sa.and_(
        REQUESTS.c.caller == key.caller,
        REQUESTS.c.request_id == key.request_id,
        REQUESTS.c.method == key.method,
        REQUESTS.c.workspace == key.workspace,
    )
