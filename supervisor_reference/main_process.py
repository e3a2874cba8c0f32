"""The sandbox's main process: what is started, and how its end is told (compute-driver contract 5.6 and 5.10)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from openshell.isolation.operations import AgentSpec, ExitKind, ExitStatus
from openshell.verdicts import Category, Stage, signal_name
from supervisor_reference.errors import GatewayError, StageError

if TYPE_CHECKING:
    from openshell.isolation.documents import MainProcessSpec
    from supervisor_reference.gateway import Gateway

_log = logging.getLogger(__name__)


def agent_spec(spec: MainProcessSpec, *, workdir: str) -> AgentSpec:
    """Return what the boundary is asked to start.

    Args:
        spec: The sandbox's main process; an empty command is the image's login shell on a terminal.
        workdir: The workspace root.
    """
    if not spec.command:
        return AgentSpec(workdir=workdir, interactive=True)
    program, *arguments = spec.command
    return AgentSpec(program=program, args=tuple(arguments), workdir=workdir, interactive=spec.tty)


def describe_exit(status: ExitStatus) -> str:
    """Return how a process ended, for people: its code, or its signal by name."""
    if status.kind is ExitKind.EXITED:
        return f"exited with code {status.value}"
    return f"was ended by {signal_name(status.value) or f'signal {status.value}'} (exit code {status.exit_code})"


async def report_exit(gateway: Gateway, status: ExitStatus) -> None:
    """Tell the gateway that the main process has ended and that nothing of it is outstanding.

    Args:
        gateway: The gateway.
        status: How it ended; a signal is told as 128 plus its number.

    Raises:
        StageError: The gateway could not be told.
    """
    told = describe_exit(status)
    _log.info("the main process %s", told)
    try:
        await gateway.report_main_process_exit(status.exit_code)
        await gateway.finalize_main_process_exit()
    except GatewayError as error:
        raise StageError(
            stage=Stage.RUNNING,
            category=Category.INFRASTRUCTURE,
            public=f"the main process {told}, but the gateway could not be told: {error.reason}",
            private=error.reason,
            status=error.status,
        ) from error
