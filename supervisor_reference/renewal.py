"""Renewal of both tokens before they expire (``RefreshSandboxToken``; tokens live one hour at most).

The gateway's token is used from the next call on. The sandbox token is handed to the boundary at once: on the same
connection where its epoch is the same, else on a new one that replaces it (isolation contract 3.7). A gateway that does
not offer the call is asked once; its token then simply expires and the session ends with UNAUTHENTICATED. A gateway
that was away for longer than a token lives is asked with the expired one when it is back: it decides whether that will
do.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from openshell.isolation.errors import IsolationError
from openshell.status import StatusCode
from supervisor_reference.errors import GatewayError

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from supervisor_reference.boundary import Boundary
    from supervisor_reference.gateway import Gateway
    from supervisor_reference.timing import Timing

_log = logging.getLogger(__name__)


def seconds_until_renewal(*, now: float, expires_at: float, timing: Timing) -> float:
    """Return how long a token is used before it is renewed.

    Args:
        now: Unix time in seconds.
        expires_at: When it expires, Unix time in seconds.
        timing: How long before that it is renewed (at most a third of what is left), and the shortest use.

    Returns:
        Seconds, never none at all: a gateway with a wrong clock is not asked without a pause.
    """
    left = max(expires_at - now, 0.0)
    return max(left - min(timing.renewal_margin_seconds, left / 3), timing.shortest_token_use_seconds)


def earliest_expiry(*expiries: float) -> float:
    """Return the first of some expiries, each Unix time in seconds and 0 for never; 0 where none ever comes."""
    return min((expiry for expiry in expiries if expiry > 0), default=0.0)


class TokenRenewal:
    """Renews the tokens of one launch.

    Args:
        gateway: The gateway.
        boundary: The boundary, which gets the sandbox token.
        expires_at: When the first of the present tokens expires, Unix time in seconds; 0 means never.
        timing: Margins.
        clock: Unix time in seconds.
    """

    def __init__(
        self,
        gateway: Gateway,
        boundary: Boundary,
        *,
        expires_at: float,
        timing: Timing,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._gateway = gateway
        self._boundary = boundary
        self._expires_at = expires_at
        self._timing = timing
        self._clock = clock
        self._renewing = asyncio.Lock()

    async def renew(self) -> None:
        """Renew the tokens now.

        Raises:
            GatewayError: The gateway gave none.
            IsolationError: The boundary did not take its one; the gateway's is in use.
        """
        async with self._renewing:
            tokens = await self._gateway.refresh_tokens()
            if tokens.sandbox_token:
                await self._boundary.renew_token(tokens.sandbox_token)
            self._expires_at = earliest_expiry(_seconds(tokens.gateway_expires_at), _seconds(tokens.sandbox_expires_at))
        _log.info("renewed the tokens")

    async def keep(self) -> None:
        """Renew the tokens in time until cancelled, or until there is nothing to renew."""
        while self._expires_at > 0:
            planned = self._expires_at
            await asyncio.sleep(seconds_until_renewal(now=self._clock(), expires_at=planned, timing=self._timing))
            if self._expires_at != planned:
                continue
            try:
                await self.renew()
            except GatewayError as error:
                if error.status is StatusCode.UNIMPLEMENTED:
                    _log.warning("the gateway renews no tokens; this one ends the session when it expires")
                    return
                _log.warning("the tokens could not be renewed yet: %s", error.reason)
                await asyncio.sleep(self._timing.renewal_retry_seconds)
            except IsolationError as error:
                # What is in force stays in force until it expires; the next attempt brings a fresh one.
                _log.warning("the boundary did not take the renewed token yet: %s", error)
                await asyncio.sleep(self._timing.renewal_retry_seconds)


def _seconds(moment: datetime | None) -> float:
    return 0.0 if moment is None else moment.timestamp()
