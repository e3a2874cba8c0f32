"""Waiting until a supervisor says that it is healthy.

Below engine API 1.44 a health check's start interval is ignored, and a short plain interval costs a fifth of a core for
each sandbox as long as it lives. So the driver runs the health command itself, until it succeeds once and not after.

A command costs the engine as much as a quarter of a container's start. So a supervisor whose image says that it tells
by itself is listened to (`openshell.ready_line`); one that has told nothing for a while is asked all the same. The
reference supervisor's command waits for readiness by itself and answers at once when it comes; upstream's answers at
once in any case, and is repeated several times a second.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

from driver_docker.engine import (
    EngineAbsentError,
    EngineConflictError,
    EngineError,
    EngineRefusedError,
    EngineTimeoutError,
)
from driver_docker.engine_objects import ContainerStatus
from driver_docker.plan import HEALTH_COMMAND
from openshell.ready_line import READY_LABEL, READY_LABEL_VALUE, READY_LINE

if TYPE_CHECKING:
    from driver_docker.engine import Engine
    from driver_docker.engine_objects import ImageFacts
    from driver_docker.sandboxes import Sandbox

_QUICK_PERIOD_SECONDS: Final = 0.25
_QUICK_SECONDS: Final = 20.0
_SLOW_PAUSE_SECONDS: Final = 1.0
_PROBE_TIMEOUT_SECONDS: Final = 10.0
_LAST_LINES_SECONDS: Final = 1.0
_OVER: Final = frozenset({ContainerStatus.EXITED, ContainerStatus.DEAD, ContainerStatus.REMOVING})


def pause_after(*, probe_seconds: float, waited_seconds: float) -> float:
    """Seconds to wait after a probe that did not succeed.

    At first a probe is worth its while several times a second: one that was answered at once is repeated soon, and one
    that has waited by itself right away. A supervisor that takes long is asked less often; it waits for people.

    Args:
        probe_seconds: How long the probe took.
        waited_seconds: How long health has been waited for.
    """
    if waited_seconds >= _QUICK_SECONDS:
        return _SLOW_PAUSE_SECONDS
    return max(_QUICK_PERIOD_SECONDS - probe_seconds, 0.0)


async def wait_until_healthy(engine: Engine, sandbox: Sandbox, *, image: ImageFacts) -> bool:
    """Wait until the supervisor is healthy.

    There is no limit of its own: the gateway's provisioning window rules, and ends it with Stop or Delete
    (compute-driver contract 5.7).

    Args:
        engine: The engine.
        sandbox: The sandbox whose supervisor was started.
        image: The image of the supervisor.

    Returns:
        False when workload or supervisor ended before they were ever healthy, as the engine's events tell, or a look
        after a refused probe or a wake-up: an event may have been lost, and a supervisor may outlive its workload.

    Raises:
        EngineUnreachableError: The engine cannot be asked.
    """
    if has_ended(sandbox):
        return False
    tells = image.labels.get(READY_LABEL) == READY_LABEL_VALUE
    probing = asyncio.create_task(_become_healthy(engine, sandbox.record.supervisor_id, tells=tells), name="health")
    ending = asyncio.create_task(_wait_until_ended(engine, sandbox), name="end before health")
    try:
        await asyncio.wait({probing, ending}, return_when=asyncio.FIRST_COMPLETED)
        if tells and sandbox.has_event(sandbox.record.supervisor_id, "die"):
            await asyncio.wait({probing}, timeout=_LAST_LINES_SECONDS)  # the log ends with the container
        # A probe that succeeded counts even if the end was seen with it: what ended after that had been ready.
        return probing.result() if probing.done() else False
    finally:
        probing.cancel()
        ending.cancel()
        await asyncio.wait({probing, ending})


async def _become_healthy(engine: Engine, supervisor: str, *, tells: bool) -> bool:
    """Return whether it became healthy; false when it is over."""
    return (tells and await _told(engine, supervisor)) or await _probe_until_healthy(engine, supervisor)


async def _told(engine: Engine, supervisor: str) -> bool:
    """Whether the supervisor says in time that it is ready. Where the log does not tell, the command will."""
    try:
        return await engine.wait_for_line(supervisor, READY_LINE, timeout_seconds=_PROBE_TIMEOUT_SECONDS)
    except EngineError:
        return False


async def _probe_until_healthy(engine: Engine, supervisor: str) -> bool:
    """Ask until it is healthy, and return true; false when it is over."""
    clock = asyncio.get_running_loop().time
    begun = clock()
    while True:
        asked = clock()
        try:
            result = await engine.exec_command(supervisor, HEALTH_COMMAND, timeout_seconds=_PROBE_TIMEOUT_SECONDS)
        except EngineAbsentError:
            return False
        except (EngineConflictError, EngineRefusedError):
            # Ended, paused, or ending just now: engines answer each with 409 or 500, so only a look can tell.
            if await _is_over(engine, supervisor):
                return False
            result = None
        except EngineTimeoutError:
            result = None
        if result is not None and result.exit_code == 0:
            return True
        now = clock()
        await asyncio.sleep(pause_after(probe_seconds=now - asked, waited_seconds=now - begun))


async def _wait_until_ended(engine: Engine, sandbox: Sandbox) -> None:
    """Return when either container has ended: an event told it, or the workload was found so after a wake-up."""
    while not has_ended(sandbox):
        await sandbox.moved.wait()
        with contextlib.suppress(EngineError):  # the probe says what becomes of an engine that does not answer
            if not has_ended(sandbox) and await _is_over(engine, sandbox.record.workload_id):
                return


async def _is_over(engine: Engine, container: str) -> bool:
    try:
        return (await engine.inspect_container(container)).status in _OVER
    except EngineAbsentError:
        return True


def has_ended(sandbox: Sandbox) -> bool:
    """Whether the end of the workload or the supervisor was seen."""
    return any(sandbox.has_event(container, "die", "destroy") for container in sandbox.container_ids)
