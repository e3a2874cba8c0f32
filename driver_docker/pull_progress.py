"""Thinning of a pull's progress: watchers get enough to draw a bar, and always the last state.

An engine tells the progress of every layer about ten times a second. What is passed on is one event at a time, the
layers in turn and each in its newest state; what is left over when the pull ends is told then.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from driver_docker.engine_objects import PullProgress

INTERVAL_SECONDS: Final = 0.1
"""The shortest time between two events of one pull."""
MAX_EVENTS_PER_SECOND: Final = 200
"""Events of one pull, counted over all sandboxes that wait for it."""
MAX_LAST_EVENTS: Final = 256
"""Events that may be told at once when a pull ends, counted over all sandboxes that wait for it."""

_LAYER: Final = re.compile(r"[0-9a-f]{12,64}")


class Clock(Protocol):
    """What is used of an event loop."""

    def time(self) -> float:
        """Monotonic seconds."""
        ...

    def call_later(self, delay: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """Call back once, later."""
        ...


class ProgressPacer:
    """Passes progress on at a bounded rate.

    Args:
        tell: Called for what is passed on.
        audience: How many sandboxes hear each event now; the more, the rarer.
        clock: The running loop, when absent.
    """

    def __init__(
        self,
        tell: Callable[[PullProgress], None],
        *,
        audience: Callable[[], int] = lambda: 1,
        clock: Clock | None = None,
    ) -> None:
        self._tell = tell
        self._audience = audience
        self._clock: Clock = clock or asyncio.get_running_loop()
        self._untold: dict[str, tuple[int, PullProgress]] = {}
        """The newest state of each layer that is not told, and its line's number; who waits longest is first."""
        self._heard = 0
        self._told: dict[str, PullProgress] = {}
        self._free_at = float("-inf")
        self._timer: asyncio.TimerHandle | None = None
        self._done = False

    def hear(self, progress: PullProgress) -> None:
        """Take one line of the engine. Lines that are about no layer are left out."""
        layer = progress.layer_id
        if self._done or not _LAYER.fullmatch(layer):
            return
        if self._told.get(layer) == progress:
            self._untold.pop(layer, None)
            return
        self._heard += 1
        self._untold[layer] = (self._heard, progress)
        if self._timer is None:
            self._tell_next()

    def finish(self) -> None:
        """Tell what is left; nothing is told afterwards. Idempotent."""
        if self._done:
            return
        self._done = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        limit = max(1, MAX_LAST_EVENTS // max(1, self._audience()))
        for _, progress in sorted(self._untold.values(), key=lambda numbered: numbered[0])[-limit:]:
            self._tell(progress)
        self._untold.clear()

    def _tell_next(self) -> None:
        self._timer = None
        wait = self._free_at - self._clock.time()
        if not self._untold or self._done:
            return
        if wait > 0:
            self._timer = self._clock.call_later(wait, self._tell_next)
            return
        layer = next(iter(self._untold))
        _, progress = self._untold.pop(layer)
        self._told[layer] = progress
        self._free_at = self._clock.time() + max(INTERVAL_SECONDS, self._audience() / MAX_EVENTS_PER_SECOND)
        if self._untold:
            self._timer = self._clock.call_later(self._free_at - self._clock.time(), self._tell_next)
        self._tell(progress)
