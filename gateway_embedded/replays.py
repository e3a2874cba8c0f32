"""Requests that name an id run once: a repeat gets the stored reply, a repeat while the first runs waits for it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import datetime

import structlog

from gateway_embedded.background import BackgroundTasks
from gateway_embedded.errors import GatewayError, InvalidRequestError, OutcomeUncertainError
from gateway_embedded.request_ledger import RequestKey, RequestLedger

USERS = "users"
"""The one caller that all users of this gateway are, as they need no token."""

REPLAYED_METADATA = ("openshell-replayed", "true")
"""Response metadata of a replayed reply."""

Work = Callable[[], Awaitable[bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A serialised reply, and whether it is an earlier one."""

    body: bytes
    replayed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Running:
    payload_sha256: str
    task: asyncio.Task[Reply]


class ReplayGuard:
    """Runs work detached from its caller, so that a client that goes away leaves nothing half done."""

    def __init__(self, ledger: RequestLedger, tasks: BackgroundTasks, *, clock: Callable[[], datetime]) -> None:
        self._ledger = ledger
        self._tasks = tasks
        self._clock = clock
        self._running: dict[RequestKey, _Running] = {}
        self._log = structlog.get_logger("gateway.replays")

    async def run(self, key: RequestKey, payload: bytes, work: Work, *, repeatable: bool = False) -> Reply:
        """Run `work`, or hand out what it gave before.

        Args:
            key: Names the request; with an empty request id nothing is remembered.
            payload: The request's deterministic bytes, without the id.
            work: Does it and returns the serialised reply. A failure is not remembered.
            repeatable: Whether work that was begun before, with an outcome that nobody knows, may simply be done again.

        Raises:
            InvalidRequestError: The id was used for another payload.
            OutcomeUncertainError: The request was begun before, and nobody knows what became of it.
            TooManyRequestsError: Too many of this caller are remembered.
        """
        if not key.request_id:
            return Reply(body=await self._detached(key.method, work()), replayed=False)
        digest = hashlib.sha256(payload).hexdigest()
        running = self._running.get(key)
        if running is not None:
            _same_payload(running.payload_sha256, digest)
            return replace(await asyncio.shield(running.task), replayed=True)
        task = self._tasks.spawn(self._once(key, digest, work, repeatable), name=f"{key.method} {key.request_id}")
        self._running[key] = _Running(payload_sha256=digest, task=task)
        task.add_done_callback(lambda _: self._running.pop(key, None))
        return await asyncio.shield(task)

    async def _once(self, key: RequestKey, digest: str, work: Work, repeatable: bool) -> Reply:
        # Admitted first: a process that is killed while it works leaves a request without an outcome, not a second run.
        earlier = await self._ledger.admit(key, digest, now=self._clock())
        if earlier is not None:
            _same_payload(earlier.payload_sha256, digest)
            if earlier.reply is not None:
                return Reply(body=earlier.reply, replayed=True)
            if not repeatable:
                raise OutcomeUncertainError(
                    f"this {key.method} was begun before and its outcome is not known; "
                    "look at what there is, then repeat it under a new request_id if need be"
                )
        try:
            body = await work()
        except GatewayError:
            await self._noted(key, self._ledger.withdraw(key))
            raise
        await self._noted(key, self._ledger.settle(key, body, now=self._clock()))
        return Reply(body=body, replayed=False)

    async def _noted(self, key: RequestKey, change: Awaitable[None]) -> None:
        """What was done is done: the caller is told, even where a repeat will have to be told that it is uncertain."""
        try:
            await change
        except GatewayError as error:
            self._log.warning("an outcome could not be stored", method=key.method, error=error.public_message)

    async def _detached(self, method: str, work: Awaitable[bytes]) -> bytes:
        async def run() -> bytes:
            return await work

        return await self._tasks.finished(run(), name=method)


def _same_payload(stored: str, given: str) -> None:
    if stored != given:
        raise InvalidRequestError(
            "request_id was used for another request; use a new id for a new request",
            field="request_id",
            reason="REQUEST_ID_PAYLOAD_MISMATCH",
        )
