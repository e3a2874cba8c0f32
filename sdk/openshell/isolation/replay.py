"""The ledger that makes a repeated request harmless (isolation contract 3.3)."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from openshell.isolation.envelope import RequestEnvelope
from openshell.isolation.errors import BackendError, DescriptorError, ProcessError, UnavailableError
from openshell.isolation.operations import Result

logger = logging.getLogger(__name__)

LEDGER_CAPACITY = 4096
"""How many request ids one generation may use."""


def _unix_milliseconds() -> int:
    return time.time_ns() // 1_000_000


@dataclass(frozen=True, slots=True)
class _Entry:
    digest: str
    expires_at_unix_ms: int | None
    outcome: asyncio.Task[Result | BackendError]


class ReplayLedger:
    """Runs each request once; the same id with the same digest gets the stored outcome, errors included.

    An error that says "not now" is not stored: the same request may succeed later.
    The work runs in a task of the ledger, so a caller that goes away does not interrupt it.

    Args:
        capacity: how many ids are held.
        now: current Unix time in milliseconds.
    """

    def __init__(self, *, capacity: int = LEDGER_CAPACITY, now: Callable[[], int] = _unix_milliseconds) -> None:
        self._capacity = capacity
        self._now = now
        self._entries: dict[str, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    async def run(self, envelope: RequestEnvelope, work: Callable[[], Awaitable[Result]]) -> Result:
        """The outcome of the request, from the ledger or by doing the work now.

        Args:
            envelope: the request with its id and verified digest.
            work: what to do if this id is new.

        Raises:
            DescriptorError: the id was used for another request, or an exec's deadline has passed.
            UnavailableError: the ledger is full.
            BackendError: what the work raised, now or the first time.
        """
        now = self._now()
        self._forget_expired(now)
        entry = self._entries.get(envelope.request_id)
        if entry is None:
            deadline = envelope.exec_expires_at_unix_ms
            if deadline is not None and deadline <= now:
                raise DescriptorError("the exec request's deadline has passed")
            if len(self._entries) >= self._capacity:
                raise UnavailableError(f"the boundary has answered its limit of {self._capacity} requests")
            task = asyncio.create_task(_outcome(work), name=f"request-{envelope.request['operation']}")
            entry = _Entry(envelope.payload_digest, deadline, task)
            self._entries[envelope.request_id] = entry
        elif not hmac.compare_digest(entry.digest, envelope.payload_digest):
            raise DescriptorError("the request id was already used for another request")
        outcome = await asyncio.shield(entry.outcome)
        if isinstance(outcome, BackendError):
            if outcome.retryable and self._entries.get(envelope.request_id) is entry:
                # It had no effect, and its sender may try the same request again.
                del self._entries[envelope.request_id]
            # A fresh error each time: raising one object twice would chain its tracebacks.
            raise type(outcome)(outcome.message)
        return outcome

    async def close(self) -> None:
        """Cancel what still runs and wait for it."""
        tasks = [entry.outcome for entry in self._entries.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _forget_expired(self, now: int) -> None:
        expired = [
            name
            for name, entry in self._entries.items()
            if entry.expires_at_unix_ms is not None and entry.expires_at_unix_ms <= now and entry.outcome.done()
        ]
        for name in expired:
            del self._entries[name]


async def _outcome(work: Callable[[], Awaitable[Result]]) -> Result | BackendError:
    try:
        return await work()
    except BackendError as error:
        return error
    except Exception:
        logger.exception("a request failed inside the backend")
        return ProcessError("the backend failed internally; its log has the cause")
