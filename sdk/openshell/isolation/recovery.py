"""Keeps one confirmed connection to a boundary, through losses and credential renewals (isolation contract 3.7)."""

from __future__ import annotations

import asyncio
import logging
from typing import TypeVar

from openshell.isolation.boundary_connection import BoundaryConnection, BoundaryTarget
from openshell.isolation.envelope import RequestEnvelope
from openshell.isolation.errors import (
    BackendError,
    ConfirmError,
    DescriptorError,
    TokenError,
    TransportLostError,
    UnavailableError,
)
from openshell.isolation.operations import Attached, Confirmed, Result
from openshell.isolation.tokens import read_auth_epoch

_R = TypeVar("_R", bound=Result)

logger = logging.getLogger(__name__)

ATTACH_SECONDS = 300.0
REQUEST_SECONDS = 30.0
PROBE_SECONDS = 5.0
RETRY_PAUSE_SECONDS = 0.1
SETTLED_SECONDS = 1.0
"""How long an exchange has to last for its failure to be an outage of its own, not the rest of the one before."""


class ConnectionKeeper:
    """The current connection, and how to replace it.

    Only failures of the transport recover; an error frame from the boundary is final. One replacement is made at a
    time, and whoever failed on the old connection waits for it. A replacement replays the stored Attach, then the
    stored Confirm, under their own ids, so that nothing happens twice.

    Every confirmation is checked, also that of a replacement, a probe or a renewal: a boundary that confirms less than
    the descriptor asks for is never used again.

    Args:
        target: which boundary is meant.
        connection: the first connection.
        sandbox_token: bearer for the Sandbox Protocol.
        recovery_seconds: how long each outage may last; 0 fails at once.
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
        self._shortfall: str | None = None

    async def send(self, envelope: RequestEnvelope, *, timeout_seconds: float | None, recovers: bool = True) -> Result:
        """Send a request on the current connection, again on its replacement when the connection fails meanwhile.

        Args:
            envelope: the request; sent again unchanged, so that the boundary answers a replay.
            timeout_seconds: limit of each attempt, none for no limit.
            recovers: whether this request is worth a recovery.

        Raises:
            TransportLostError: the connection failed and was not replaced.
            ConfirmError: the boundary confirmed something else than it was launched as, now or before.
            BackendError: the boundary's error frame.
        """
        loop = asyncio.get_running_loop()
        deadline: float | None = None
        while True:
            # Captured before the attempt: a late failure of this connection must not retire a newer one.
            connection = self.current
            sent_at = loop.time()
            try:
                result = await connection.exchange(envelope, timeout_seconds=timeout_seconds)
            except TransportLostError as lost:
                self._require_usable()
                if not recovers:
                    raise
                now = loop.time()
                settled = now - sent_at >= SETTLED_SECONDS and (timeout_seconds is None or connection.closed.is_set())
                if deadline is None or settled:
                    # An outage of its own. A request that fails again at once shares what is left of the one before, so
                    # that a boundary which confirms and then drops everything is given up in the end.
                    deadline = now + self._recovery_seconds
                await self._replace(connection, lost, deadline)
            else:
                if isinstance(result, Confirmed):
                    await self._check(connection, result)
                    self._confirmed = True
                return result

    async def renew(self, sandbox_token: str) -> None:
        """Use another token: on this connection when its epoch is the same, else on a new one that replaces this.

        Raises:
            TokenError: the token has no readable epoch, or the boundary refuses it; the one before stays in use.
            ConfirmError: the boundary confirmed something else than it was launched as, now or before.
            BackendError: the boundary does not confirm, or not in time.
        """
        renewed_epoch = read_auth_epoch(sandbox_token)
        async with self._replacing:
            self._require_usable()
            if renewed_epoch == read_auth_epoch(self._token):
                await self._renew_in_place(self.current, sandbox_token)
                return
            old = self.current
            try:
                # Clipped, since a loss meanwhile waits for this to end.
                async with asyncio.timeout(REQUEST_SECONDS):
                    self.current = await self._reattach(old.generation + 1, sandbox_token)
            except TimeoutError:
                raise UnavailableError(f"the token was not taken within {REQUEST_SECONDS:.0f} seconds") from None
            self._token = sandbox_token
            await old.close()

    async def close(self) -> None:
        """Cut the current connection; idempotent."""
        await self.current.close()

    def _require_usable(self) -> None:
        if self._shortfall is not None:
            raise ConfirmError(self._shortfall)

    async def _renew_in_place(self, connection: BoundaryConnection, sandbox_token: str) -> None:
        connection.use_token(sandbox_token)
        if self._confirmed and self.confirm is not None:
            try:
                result = await connection.exchange(self.confirm, timeout_seconds=REQUEST_SECONDS)
            except TokenError:
                connection.use_token(self._token)
                raise
            await self._check(connection, _expect(result, Confirmed))
        self._token = sandbox_token

    async def _replace(self, lost: BoundaryConnection, error: TransportLostError, deadline: float) -> None:
        async with self._replacing:
            self._require_usable()
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
            await self._reattach_until(deadline, lost, error)
            logger.info("connected to the boundary again")

    async def _reattach_until(self, deadline: float, lost: BoundaryConnection, error: TransportLostError) -> None:
        failure: UnavailableError = error
        try:
            # One limit for all of it: a boundary that takes the connection and then says nothing is not waited for.
            async with asyncio.timeout_at(deadline):
                while True:
                    try:
                        self.current = await self._reattach(lost.generation + 1, self._token)
                    except UnavailableError as reason:
                        failure = reason
                        await asyncio.sleep(RETRY_PAUSE_SECONDS)
                    else:
                        return
        except TimeoutError:
            text = f"not recovered within {self._recovery_seconds:.0f} seconds: {failure.message}"
            raise TransportLostError(text) from failure

    async def _answers(self, connection: BoundaryConnection) -> bool:
        if self.confirm is None:
            return False
        try:
            result = await connection.exchange(self.confirm, timeout_seconds=PROBE_SECONDS)
        except BackendError:
            return False
        if not isinstance(result, Confirmed):
            return False
        await self._check(connection, result)
        return True

    async def _reattach(self, generation: int, sandbox_token: str) -> BoundaryConnection:
        connection = await BoundaryConnection.open(self._target, sandbox_token=sandbox_token, generation=generation)
        try:
            if self.attach is not None:
                attached = await connection.exchange(self.attach, timeout_seconds=ATTACH_SECONDS)
                require_generation(self._target, _expect(attached, Attached))
            if self._confirmed and self.confirm is not None:
                confirmed = await connection.exchange(self.confirm, timeout_seconds=REQUEST_SECONDS)
                await self._check(connection, _expect(confirmed, Confirmed))
        except BaseException:
            await connection.close()
            raise
        return connection

    async def _check(self, connection: BoundaryConnection, result: Confirmed) -> None:
        """Hold a confirmation against the descriptor; one that falls short is the end of this boundary's use."""
        descriptor = self._target.descriptor
        try:
            result.confirmation.require(
                generation=descriptor.generation,
                session_id=descriptor.session_id,
                identity=descriptor.workload_identity,
                outer_fence=descriptor.outer_fence,
                resource_claims=descriptor.resource_claims,
            )
        except ConfirmError as error:
            self._shortfall = error.message
            logger.critical("the boundary does not confirm its enforcement: %s; it is not used further", error.message)
            await connection.close()
            raise


def require_generation(target: BoundaryTarget, attached: Attached) -> None:
    """Check that an Attach was answered for the generation that is meant.

    Raises:
        DescriptorError: it was answered for another one.
    """
    if attached.snapshot.generation != target.descriptor.generation:
        raise DescriptorError("the boundary attached another generation")


def _expect(result: Result, expected: type[_R]) -> _R:
    if not isinstance(result, expected):
        raise DescriptorError(f"the boundary answered a replay with {result.TAG[1]}")
    return result
