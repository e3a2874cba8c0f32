"""Renewal of the gateway token before it expires (``RefreshSandboxToken``; tokens live one hour at most).

Limits of this build: only the gateway's token is renewed. The sandbox token is checked when a stream to the boundary
opens, and the client of the boundary cannot change its bearer; once it has expired, the running `wait` goes on, but the
boundary refuses an orderly termination, which its driver then carries out by stopping the workload. A gateway that
does not offer the call is asked once; its token then simply expires and the session ends with UNAUTHENTICATED.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from openshell.status import StatusCode
from supervisor_reference.errors import GatewayError

if TYPE_CHECKING:
    from collections.abc import Callable

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


async def keep_renewing(
    gateway: Gateway, *, expires_at: int, timing: Timing, clock: Callable[[], float] = time.time
) -> None:
    """Renew the gateway token until cancelled, or until there is nothing to renew.

    Args:
        gateway: The gateway.
        expires_at: When the present token expires, Unix time in seconds; 0 means never.
        timing: Margins.
        clock: Unix time in seconds.
    """
    expiry = float(expires_at)
    while expiry > 0:
        await asyncio.sleep(seconds_until_renewal(now=clock(), expires_at=expiry, timing=timing))
        try:
            tokens = await gateway.refresh_tokens()
        except GatewayError as error:
            if error.status is StatusCode.UNIMPLEMENTED:
                _log.warning("the gateway renews no tokens; this one ends the session when it expires")
                return
            _log.warning("the gateway token could not be renewed yet: %s", error.reason)
            await asyncio.sleep(timing.renewal_retry_seconds)
            continue
        if tokens.gateway_expires_at is None:
            return
        expiry = tokens.gateway_expires_at.timestamp()
        _log.info("renewed the gateway token")
