"""The supervisor as a process: signals, exit codes and last words around a `Supervisor`."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import uuid
from typing import TYPE_CHECKING, Final

from openshell.verdicts import LastWords, Stage
from supervisor_reference import log
from supervisor_reference.errors import LaunchInputError, StageError
from supervisor_reference.exit_codes import ExitCode
from supervisor_reference.last_words import speak, words_of_defect, words_of_signal
from supervisor_reference.launch import read_launch_inputs
from supervisor_reference.timing import Timing

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping, Sequence

    from supervisor_reference.launch import LaunchInputs
    from supervisor_reference.run import Supervisor

_log = logging.getLogger(__name__)

_CANCEL_SECONDS: Final = 0.4
_CLOSE_SECONDS: Final = 0.4


def run_process(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a supervisor to its end; the last line on standard error says why, unless it ends in order.

    Args:
        arguments: The command line without the program's name.
        environment: The process environment.

    Returns:
        An exit code of `ExitCode`.
    """
    log.configure(environment.get("OPENSHELL_LOG_LEVEL", "info"), context=_context(environment))
    try:
        inputs = read_launch_inputs(arguments, environment)
        # Not closed on purpose: closing waits for threads, and the process is about to end anyway.
        code, words = asyncio.Runner().run(_supervised(inputs, Timing()))
    except LaunchInputError as error:
        code, words = error.exit_code, error.last_words
    except Exception as error:
        _log.exception("the supervisor failed")
        code, words = ExitCode.INTERNAL, words_of_defect(error, Stage.BUILD)
    if words is not None:
        speak(words)
    return int(code)


async def _supervised(inputs: LaunchInputs, timing: Timing) -> tuple[ExitCode, LastWords | None]:
    # Heavy: gRPC and the generated messages. A wrong launch input is told without paying for them.
    from supervisor_reference.boundary import connect_backend
    from supervisor_reference.grpc_gateway import GrpcGateway
    from supervisor_reference.run import Supervisor

    instance_id = str(uuid.uuid4())
    if inputs.without_effect:
        _log.info("settings without effect in this build: %s", ", ".join(inputs.without_effect))
    gateway = GrpcGateway(
        inputs.endpoint,
        sandbox_id=inputs.sandbox_id,
        sandbox_name=inputs.sandbox_name,
        instance_id=instance_id,
        token=inputs.auth.gateway_token,
        timing=timing,
    )
    supervisor = Supervisor(
        inputs, gateway=gateway, open_boundary=connect_backend, instance_id=instance_id, timing=timing
    )
    return await until_end_or_signal(supervisor, timing)


async def until_end_or_signal(supervisor: Supervisor, timing: Timing) -> tuple[ExitCode, LastWords | None]:
    """Run a supervisor until it ends or a signal ends it, then close.

    Only an orderly end terminates the boundary. A supervisor that fails or is told to end leaves it alone: a boundary
    that loses its supervisor freezes the workload by itself, and its driver, which sees the supervisor end first, tells
    why and stops the workload. Were the workload ended from here, it would end first, and the cause would be hidden.

    SIGTERM and SIGINT end it within a second; a second one ends the process at once.

    Args:
        supervisor: The supervisor.
        timing: Limits.

    Returns:
        The exit code, and the last words for every code but 0.
    """
    loop = asyncio.get_running_loop()
    asked: asyncio.Future[signal.Signals] = loop.create_future()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _on_signal, number, asked)
    running = asyncio.create_task(supervisor.run(), name="supervisor")
    try:
        either: set[asyncio.Future[None] | asyncio.Future[signal.Signals]] = {running, asked}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            return await _ended(supervisor, running, timing)
        return await _interrupted(supervisor, running, asked.result())
    finally:
        running.cancel()
        await _within(_CLOSE_SECONDS, supervisor.close())


async def _ended(
    supervisor: Supervisor, running: asyncio.Task[None], timing: Timing
) -> tuple[ExitCode, LastWords | None]:
    error = running.exception()
    if error is None:
        await supervisor.terminate(timing.orderly_terminate_seconds)
        return ExitCode.ORDERLY, None
    if isinstance(error, StageError):
        _log.error("the supervisor gives up: %s", error.public, extra={"facts": {"private": error.private}})
        return error.exit_code, error.last_words
    _log.error("the supervisor failed", exc_info=error)
    return ExitCode.INTERNAL, words_of_defect(error, supervisor.stage)


async def _interrupted(
    supervisor: Supervisor, running: asyncio.Task[None], number: signal.Signals
) -> tuple[ExitCode, LastWords]:
    stage = supervisor.stage
    _log.warning("%s received; ending", number.name)
    running.cancel()
    await asyncio.wait({running}, timeout=_CANCEL_SECONDS)
    return ExitCode(128 + number), words_of_signal(number.name, stage)


def _on_signal(number: signal.Signals, asked: asyncio.Future[signal.Signals]) -> None:
    if asked.done():
        os._exit(128 + number)
    asked.set_result(number)


async def _within(seconds: float, work: Coroutine[object, object, None]) -> None:
    try:
        async with asyncio.timeout(seconds):
            await work
    except TimeoutError:
        _log.warning("a connection did not close in time")


def _context(environment: Mapping[str, str]) -> dict[str, str]:
    sandbox_id = environment.get("OPENSHELL_SANDBOX_ID")
    return {"sandbox_id": sandbox_id} if sandbox_id else {}
