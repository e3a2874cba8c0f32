"""Requests that name an id run once: a repeat gets the stored reply, a repeat while the first runs waits for it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from gateway_embedded.background import BackgroundTasks
from gateway_embedded.errors import InvalidRequestError
from gateway_embedded.store import SandboxStore, StoredReply

REPLAY_LIFETIME = timedelta(hours=24)
"""How long a reply is replayed (public-api contract 2.2)."""

REPLAYED_METADATA = ("openshell-replayed", "true")
"""Response metadata of a replayed reply."""


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

    def __init__(self, store: SandboxStore, tasks: BackgroundTasks, *, clock: Callable[[], datetime]) -> None:
        self._store = store
        self._tasks = tasks
        self._clock = clock
        self._running: dict[tuple[str, str, str], _Running] = {}

    async def run(
        self, method: str, workspace: str, request_id: str, payload: bytes, work: Callable[[], Awaitable[bytes]]
    ) -> Reply:
        """Run `work`, or hand out what it gave before.

        Args:
            method: Name of the RPC.
            workspace: Workspace that the request names.
            request_id: The caller's id for it; empty means that nothing is remembered.
            payload: The request's deterministic bytes, without the id.
            work: Does it and returns the serialised reply. A failure is not remembered.

        Raises:
            InvalidRequestError: The id was used for another payload.
        """
        if not request_id:
            return Reply(body=await self._detached(method, work()), replayed=False)
        key = (request_id, method, workspace)
        digest = hashlib.sha256(payload).hexdigest()
        running = self._running.get(key)
        if running is not None:
            _same_payload(running.payload_sha256, digest)
            return replace(await asyncio.shield(running.task), replayed=True)
        task = self._tasks.spawn(self._once(key, digest, work), name=f"{method} {request_id}")
        self._running[key] = _Running(payload_sha256=digest, task=task)
        task.add_done_callback(lambda _: self._running.pop(key, None))
        return await asyncio.shield(task)

    async def _once(self, key: tuple[str, str, str], digest: str, work: Callable[[], Awaitable[bytes]]) -> Reply:
        stored = await self._store.reply(*key)
        if stored is not None:
            _same_payload(stored.payload_sha256, digest)
            return Reply(body=stored.reply, replayed=True)
        body = await work()
        reply = StoredReply(payload_sha256=digest, reply=body)
        await self._store.keep_reply(*key, reply, now=self._clock(), lifetime=REPLAY_LIFETIME)
        return Reply(body=body, replayed=False)

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
