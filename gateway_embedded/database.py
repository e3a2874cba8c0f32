"""One SQL database with all state of a gateway; SQLite by default, the URL decides.

All statements run in one worker thread, so the event loop never waits for a disk; each piece of work is one
transaction, so a killed process leaves a consistent file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, SQLAlchemyError

from gateway_embedded.errors import ConfigurationError, GatewayError, StoreError
from gateway_embedded.tables import EVENTS, FORMER_REPLIES, GATEWAY, METADATA, SANDBOXES, SCHEMA_VERSION

_T = TypeVar("_T")


class Database:
    """Open it with `open`, end it with `close`."""

    def __init__(self, url: str) -> None:
        self._engine = sa.create_engine(url)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gateway-store")

    async def open(self) -> None:
        """Create or check the tables.

        Raises:
            ConfigurationError: The database belongs to another version of the gateway.
            StoreError: It cannot be used.
        """
        await self.run(_prepare)

    async def close(self) -> None:
        """Finish what is queued and let go of the database."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._engine.dispose)
        self._thread.shutdown()

    async def setting(self, key: str, default: Callable[[], str]) -> str:
        """A value that is chosen once and then kept, for example the gateway's id."""

        def work(db: sa.Connection) -> str:
            found = db.execute(sa.select(GATEWAY.c.value).where(GATEWAY.c.key == key)).scalar_one_or_none()
            if found is not None:
                return str(found)
            value = default()
            db.execute(sa.insert(GATEWAY).values(key=key, value=value))
            return value

        return await self.run(work)

    async def run(self, work: Callable[[sa.Connection], _T], *, conflict: GatewayError | None = None) -> _T:
        """Do a piece of work in a transaction of its own.

        Args:
            work: Gets the connection; runs in the database's thread.
            conflict: What it means when a row that must be the only one exists already.

        Raises:
            GatewayError: `conflict`, or whatever `work` raises.
            StoreError: The database did not do it.
        """

        def transact() -> _T:
            try:
                with self._engine.begin() as db:
                    return work(db)
            except SQLAlchemyError as error:
                if conflict is not None and isinstance(error, IntegrityError):
                    raise conflict from error
                raise _unusable(error) from error

        future = asyncio.get_running_loop().run_in_executor(self._thread, transact)
        # A cancelled caller must not leave its statement half-awaited: the transaction ends before the caller does.
        return await asyncio.shield(future)


def _prepare(db: sa.Connection) -> None:
    if db.dialect.name == "sqlite":
        db.exec_driver_sql("PRAGMA journal_mode=WAL")
    METADATA.create_all(db)
    query = sa.select(GATEWAY.c.value).where(GATEWAY.c.key == "schema_version")
    version = db.execute(query).scalar_one_or_none()
    if version is None:
        db.execute(sa.insert(GATEWAY).values(key="schema_version", value=SCHEMA_VERSION))
    elif version != SCHEMA_VERSION:
        raise ConfigurationError(
            f"the state is of version {version}, this gateway reads version {SCHEMA_VERSION}; "
            "use a new state folder or the gateway that wrote it"
        )
    _forget_former_replies(db)
    db.execute(sa.delete(EVENTS).where(EVENTS.c.sandbox_id.not_in(sa.select(SANDBOXES.c.id))))


def _forget_former_replies(db: sa.Connection) -> None:
    if db.dialect.name == "sqlite":
        # Else what the table held would stay readable in the file.
        db.exec_driver_sql("PRAGMA secure_delete=ON")
    FORMER_REPLIES.drop(db, checkfirst=True)


def _unusable(error: SQLAlchemyError) -> StoreError:
    # The library's own text would quote the statement with its values; a database quotes the row that it refuses.
    quotes_a_row = isinstance(error, IntegrityError | DataError)
    cause = str(error.orig) if isinstance(error, DBAPIError) and not quotes_a_row else type(error).__name__
    return StoreError(f"the gateway's state could not be read or written: {cause}")
