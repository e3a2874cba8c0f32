"""Waiting until a supervisor says that it is healthy.

Below engine API 1.44 a health check's start interval is ignored, and a short plain interval costs a fifth of a core for
each sandbox as long as it lives. So the driver runs the health command itself, until it succeeds once and not after.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

from driver_docker.engine import (
    ContainerStatus,
    EngineAbsentError,
    EngineConflictError,
    EngineRefusedError,
    EngineTimeoutError,
)
from driver_docker.plan import HEALTH_COMMAND

if TYPE_CHECKING:
    from driver_docker.engine import Engine
    from driver_docker.sandboxes import Sandbox

_FIRST_PAUSE_SECONDS: Final = 0.25
_PAUSE_SECONDS: Final = 0.15
_SLOW_PAUSE_SECONDS: Final = 1.0
_QUICK_PROBES: Final = 60
_PROBE_TIMEOUT_SECONDS: Final = 10.0
_OVER: Final = frozenset({ContainerStatus.EXITED, ContainerStatus.DEAD, ContainerStatus.REMOVING})


def pause_before(probe: int) -> float:
    """Seconds to wait before a probe.

    A supervisor needs a moment to come up; then a probe, which itself takes a tenth of a second, is worth its while
    several times a second; one that is not ready after that is asked once a second.
    """
    if probe == 0:
        return _FIRST_PAUSE_SECONDS
    return _PAUSE_SECONDS if probe < _QUICK_PROBES else _SLOW_PAUSE_SECONDS


async def wait_until_healthy(engine: Engine, sandbox: Sandbox) -> bool:
    """Probe until healthy.

    There is no limit of its own: the gateway's provisioning window rules, and ends it with Stop or Delete
    (compute-driver contract 5.7).

    Args:
        engine: The engine.
        sandbox: The sandbox whose supervisor was started.

    Returns:
        False when workload or supervisor ended first, as the engine's events or a look after a refused probe tell.

    Raises:
        EngineUnreachableError: The engine cannot be asked.
    """
    probe = 0
    while True:
        moved = sandbox.moved
        if has_ended(sandbox):
            return False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_before(probe)):
                await moved.wait()
                continue
        try:
            result = await engine.exec_command(
                sandbox.record.supervisor_id, HEALTH_COMMAND, timeout_seconds=_PROBE_TIMEOUT_SECONDS
            )
        except EngineAbsentError:
            return False
        except (EngineConflictError, EngineRefusedError):
            # Ended, paused, or ending just now: engines answer each with 409 or 500, so only a look can tell.
            if await _is_over(engine, sandbox.record.supervisor_id):
                return False
            result = None
        except EngineTimeoutError:
            result = None
        if result is not None and result.exit_code == 0:
            return not has_ended(sandbox)
        probe += 1


async def _is_over(engine: Engine, container: str) -> bool:
    try:
        return (await engine.inspect_container(container)).status in _OVER
    except EngineAbsentError:
        return True


def has_ended(sandbox: Sandbox) -> bool:
    """Whether the end of the workload or the supervisor was seen."""
    return any(sandbox.has_event(container, "die", "destroy") for container in sandbox.container_ids)
