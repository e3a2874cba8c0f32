"""An engine whose calls are timed and counted. Everything else passes through."""

from __future__ import annotations

import inspect
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, cast

from driver_docker.engine import Engine

if TYPE_CHECKING:
    from driver_docker.metrics import Metrics

CALLS: Final = frozenset(
    name
    for name, member in vars(Engine).items()
    if inspect.iscoroutinefunction(member) and not name.startswith("_") and name != "close"
)
"""The calls of the protocol: the only values that the label `call` can have."""


class _MeteredEngine:
    def __init__(self, engine: Engine, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._engine, name)
        if name not in CALLS:
            return member
        metrics = self._metrics

        @wraps(member)
        async def timed(*positional: Any, **named: Any) -> Any:
            with metrics.engine_call(name):
                return await member(*positional, **named)

        setattr(self, name, timed)  # the next access finds it at once
        return timed


def metered(engine: Engine, metrics: Metrics) -> Engine:
    """The same engine, observed."""
    return cast("Engine", _MeteredEngine(engine, metrics))
