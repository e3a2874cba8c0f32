from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from gateway_embedded.background import BackgroundTasks
from gateway_embedded.database import Database
from gateway_embedded.errors import (
    GatewayError,
    InvalidRequestError,
    OutcomeUncertainError,
    StoreError,
    TooManyRequestsError,
)
from gateway_embedded.replays import USERS, ReplayGuard
from gateway_embedded.request_ledger import (
    ADMISSIONS_PER_CALLER,
    REPLAY_LIFETIME,
    LedgerEntry,
    RequestKey,
    RequestLedger,
)
from openshell.status import StatusCode

NOW = datetime(2026, 10, 1, 12, tzinfo=UTC)
MOMENT = timedelta(microseconds=1)
KEY = RequestKey(caller=USERS, request_id=str(uuid.uuid4()), method="CreateSandbox", workspace="default")


@pytest.fixture
async def database() -> AsyncIterator[Database]:
    opened = Database("sqlite://")
    await opened.open()
    yield opened
    await opened.close()


@pytest.fixture
def ledger(database: Database) -> RequestLedger:
    return RequestLedger(database)


class Runs:
    """A gateway process: a guard, and work that counts."""

    def __init__(self, ledger: RequestLedger) -> None:
        self.now = NOW
        self.tasks = BackgroundTasks()
        self.guard = ReplayGuard(ledger, self.tasks, clock=lambda: self.now)
        self.count = 0

    async def work(self) -> bytes:
        self.count += 1
        return b"reply %d" % self.count

    async def run(
        self, work: Callable[[], Awaitable[bytes]] | None = None, key: RequestKey = KEY
    ) -> tuple[bytes, bool]:
        reply = await self.guard.run(key, b"payload", work or self.work)
        return reply.body, reply.replayed


async def test_a_reply_is_replayed_for_a_day_and_no_longer(ledger: RequestLedger) -> None:
    runs = Runs(ledger)
    assert await runs.run() == (b"reply 1", False)
    runs.now = NOW + REPLAY_LIFETIME
    assert await runs.run() == (b"reply 1", True)
    with pytest.raises(InvalidRequestError) as caught:
        await runs.guard.run(KEY, b"other", runs.work)
    assert caught.value.reason == "REQUEST_ID_PAYLOAD_MISMATCH"
    runs.now += MOMENT
    assert await runs.run() == (b"reply 2", False)


async def test_an_id_belongs_to_its_caller_method_and_workspace(ledger: RequestLedger) -> None:
    runs = Runs(ledger)
    others = [replace(KEY, **{field: "another"}) for field in ("caller", "request_id", "method", "workspace")]
    for number, key in enumerate((KEY, *others), start=1):
        assert await runs.run(key=key) == (b"reply %d" % number, False)


async def test_a_request_that_a_killed_gateway_began_is_not_run_again(ledger: RequestLedger) -> None:
    killed = Runs(ledger)
    begun = asyncio.Event()

    async def work() -> bytes:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    caller = asyncio.create_task(killed.run(work))
    await begun.wait()
    await killed.tasks.close(grace_seconds=0)
    await asyncio.gather(caller, return_exceptions=True)
    next_process = Runs(ledger)
    next_process.now = NOW + 1000 * REPLAY_LIFETIME
    for _ in range(2):
        with pytest.raises(OutcomeUncertainError, match="CreateSandbox was begun before") as caught:
            await next_process.run()
        assert (caught.value.status, caught.value.reason) == (StatusCode.ABORTED, "REQUEST_OUTCOME_UNCERTAIN")
    assert next_process.count == 0
    with pytest.raises(InvalidRequestError):
        await next_process.guard.run(KEY, b"other", next_process.work)
    assert await next_process.run(key=replace(KEY, request_id=str(uuid.uuid4()))) == (b"reply 1", False)


async def test_work_that_means_the_same_however_often_it_is_done_is_done_again(ledger: RequestLedger) -> None:
    assert await ledger.admit(KEY, hashlib.sha256(b"payload").hexdigest(), now=NOW) is None
    runs = Runs(ledger)
    with pytest.raises(OutcomeUncertainError):
        await runs.run()
    for replayed in (False, True):
        reply = await runs.guard.run(KEY, b"payload", runs.work, repeatable=True)
        assert (reply.body, reply.replayed) == (b"reply 1", replayed)


async def test_a_failure_may_be_repeated_but_a_crash_is_uncertain(ledger: RequestLedger) -> None:
    runs = Runs(ledger)

    async def refused() -> bytes:
        raise GatewayError("no")

    async def crash() -> bytes:
        raise RuntimeError("boom")

    with pytest.raises(GatewayError, match="no"):
        await runs.run(refused)
    assert await runs.run() == (b"reply 1", False)
    key = replace(KEY, method="DeleteSandbox")
    with pytest.raises(RuntimeError):
        await runs.run(crash, key=key)
    with pytest.raises(OutcomeUncertainError):
        await runs.run(key=key)


async def test_what_was_done_is_told_even_where_it_cannot_be_stored(
    ledger: RequestLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Runs(ledger)

    async def full(*_: object, **__: object) -> None:
        raise StoreError("disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(ledger, "settle", full)
        assert await runs.run() == (b"reply 1", False)
    with pytest.raises(OutcomeUncertainError):
        await runs.run()


async def test_a_caller_has_a_thousand_admissions(ledger: RequestLedger) -> None:
    for number in range(ADMISSIONS_PER_CALLER):
        key = replace(KEY, request_id=str(uuid.UUID(int=number + 1)))
        assert await ledger.admit(key, "p", now=NOW) is None
        if number:  # the first one never gets an answer
            await ledger.settle(key, b"r", now=NOW)
    with pytest.raises(TooManyRequestsError, match="leave request_id out") as caught:
        await ledger.admit(KEY, "p", now=NOW + REPLAY_LIFETIME)
    assert caught.value.status is StatusCode.RESOURCE_EXHAUSTED
    # A repeat is no new admission, and others have their own.
    first = replace(KEY, request_id=str(uuid.UUID(int=1)))
    assert await ledger.admit(first, "p", now=NOW) == LedgerEntry(payload_sha256="p", reply=None)
    assert await ledger.admit(replace(KEY, caller="another"), "p", now=NOW) is None
    assert await ledger.admit(KEY, "p", now=NOW + REPLAY_LIFETIME + MOMENT) is None
    assert await ledger.admit(first, "p", now=NOW + REPLAY_LIFETIME + MOMENT) is not None
