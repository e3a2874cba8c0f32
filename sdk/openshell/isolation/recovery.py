"""Keeps one confirmed connection to a boundary, through losses and credential renewals (isolation contract 3.7)."""

from __future__ import annotations

import asyncio
import logging

from openshell.isolation.boundary_connection import BoundaryConnection, BoundaryTarget
from openshell.isolation.envelope import RequestEnvelope
from openshell.isolation.errors import BackendError, DescriptorError, TransportLostError, UnavailableError
from openshell.isolation.operations import Attached, Confirmed, Result
from openshell.isolation.tokens import read_auth_epoch

logger = logging.getLogger(__name__)

ATTACH_SECONDS = 300.0
REQUEST_SECONDS = 30.0
PROBE_SECONDS = 5.0
RETRY_PAUSE_SECONDS = 0.1


class ConnectionKeeper:
    """The current connection, and how to replace it.

    Only failures of the transport recover; an error frame from the boundary is final. One replacement is made at a
    time, and whoever failed on the old connection waits for it. A replacement replays the stored Attach, then the
    stored Confirm, under their own ids, so that nothing happens twice.

    Args:
        target: which boundary is meant.
        connection: the first connection.
        sandbox_token: bearer for the Sandbox Protocol.
        recovery_seconds: how long a lost connection is tried to be replaced; 0 fails at once.
    """

    def __init__(
        self, target: BoundaryTarget, connection: BoundaryConnection, *, sandbox_token: str, recovery_seconds: float
    ) -> None:
        self.current = connection
        self.attach: RequestEnvelope | None = None
        self.confirm: RequestEnvelope | None = None
        self._target = target
        self._token = sandbox_token
        self._recovery_seconds = recovery_seconds
        self._replacing = asyncio.Lock()
        self._confirmed = False

    async def send(self, envelope: RequestEnvelope, *, timeout_seconds: float | None, recovers: bool = True) -> Result:
        """Send a request on the current connection, again on its replacement when the connection fails meanwhile.

        Args:
            envelope: the request; sent again unchanged, so that the boundary answers a replay.
            timeout_seconds: limit of each attempt, none for no limit.
            recovers: whether this request is worth a recovery.

        Raises:
            TransportLostError: the connection failed and was not replaced.
            BackendError: the boundary's error frame.
        """
        loop = asyncio.get_running_loop()
        deadline: float | None = None
        while True:
            # Captured before the attempt: a late failure of this connection must not retire a newer one.
            connection = self.current
            try:
                result = await connection.exchange(envelope, timeout_seconds=timeout_seconds)
            except TransportLostError as lost:
                now = loop.time()
                deadline = deadline if deadline is not None else now + self._recovery_seconds
                if not recovers:
                    raise
                await self._replace(connection, lost, deadline)
            else:
                if isinstance(result, Confirmed):
                    self._confirmed = True
                return result

    async def renew(self, sandbox_token: str) -> None:
        """Use another token: on this connection when its epoch is the same, else on a new one that replaces this.

        Raises:
            TokenError: the token has no readable epoch, or the boundary refuses it.
            BackendError: the boundary does not confirm.
        """
        renewed_epoch = read_auth_epoch(sandbox_token)
        async with self._replacing:
            if renewed_epoch == read_auth_epoch(self._token):
                self.current.use_token(sandbox_token)
                self._token = sandbox_token
                if self._confirmed and self.confirm is not None:
                    await self.current.exchange(self.confirm, timeout_seconds=REQUEST_SECONDS)
                return
            old = self.current
            self.current = await self._reattach(old.generation + 1, sandbox_token)
            self._token = sandbox_token
            await old.close()

    async def close(self) -> None:
        """Cut the current connection; idempotent."""
        await self.current.close()

    async def _replace(self, lost: BoundaryConnection, error: TransportLostError, deadline: float) -> None:
        async with self._replacing:
            if self.current is not lost:
                return
            if not self._confirmed or self._recovery_seconds <= 0:
                raise error
            loop = asyncio.get_running_loop()
            if not lost.closed.is_set() and await self._answers(lost):
                if loop.time() >= deadline:
                    raise error
                await asyncio.sleep(RETRY_PAUSE_SECONDS)
                return
            logger.warning("the connection to the boundary was lost: %s; replacing it", error.message)
            await lost.close()
            while True:
                try:
                    self.current = await self._reattach(lost.generation + 1, self._token)
                except UnavailableError as failure:
                    if loop.time() >= deadline:
                        text = f"not recovered within {self._recovery_seconds:.0f} seconds: {failure.message}"
                        raise TransportLostError(text) from failure
                    await asyncio.sleep(RETRY_PAUSE_SECONDS)
                else:
                    logger.info("connected to the boundary again")
                    return

    async def _answers(self, connection: BoundaryConnection) -> bool:
        if self.confirm is None:
            return False
        try:
            result = await connection.exchange(self.confirm, timeout_seconds=PROBE_SECONDS)
        except BackendError:
            return False
        return isinstance(result, Confirmed)

    async def _reattach(self, generation: int, sandbox_token: str) -> BoundaryConnection:
        connection = await BoundaryConnection.open(self._target, sandbox_token=sandbox_token, generation=generation)
        try:
            if self.attach is not None:
                _expect(await connection.exchange(self.attach, timeout_seconds=ATTACH_SECONDS), Attached)
            if self._confirmed and self.confirm is not None:
                _expect(await connection.exchange(self.confirm, timeout_seconds=REQUEST_SECONDS), Confirmed)
        except BaseException:
            await connection.close()
            raise
        return connection


def _expect(result: Result, expected: type[Result]) -> None:
    if not isinstance(result, expected):
        raise DescriptorError(f"the boundary answered a replay with {result.TAG[1]}")
