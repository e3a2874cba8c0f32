"""Renewal of both tokens before they expire (``RefreshSandboxToken``; tokens live one hour at most).

The gateway's token is used from the next call on. The sandbox token is handed to the boundary at once: on the same
connection where its epoch is the same, else on a new one that replaces it (isolation contract 3.7). A gateway that does
not offer the call is asked once; its token then simply expires and the session ends with UNAUTHENTICATED.
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


async def keep_renewing(
    gateway: Gateway, boundary: Boundary, *, expires_at: float, timing: Timing, clock: Callable[[], float] = time.time
) -> None:
    """Renew the tokens until cancelled, or until there is nothing to renew.

    Args:
        gateway: The gateway.
        boundary: The boundary, which gets the sandbox token.
        expires_at: When the first of the present tokens expires, Unix time in seconds; 0 means never.
        timing: Margins.
        clock: Unix time in seconds.
    """
    expiry = expires_at
    while expiry > 0:
        await asyncio.sleep(seconds_until_renewal(now=clock(), expires_at=expiry, timing=timing))
        try:
            tokens = await gateway.refresh_tokens()
            if tokens.sandbox_token:
                await boundary.renew_token(tokens.sandbox_token)
        except GatewayError as error:
            if error.status is StatusCode.UNIMPLEMENTED:
                _log.warning("the gateway renews no tokens; this one ends the session when it expires")
                return
            _log.warning("the tokens could not be renewed yet: %s", error.reason)
            await asyncio.sleep(timing.renewal_retry_seconds)
        except IsolationError as error:
            # What is in force stays in force until it expires; the next attempt brings a fresh one.
            _log.warning("the boundary did not take the renewed token yet: %s", error)
            await asyncio.sleep(timing.renewal_retry_seconds)
        else:
            expiry = earliest_expiry(_seconds(tokens.gateway_expires_at), _seconds(tokens.sandbox_expires_at))
            _log.info("renewed the tokens")


def _seconds(moment: datetime | None) -> float:
    return 0.0 if moment is None else moment.timestamp()
