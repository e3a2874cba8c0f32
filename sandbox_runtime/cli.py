"""``openshell-sandbox --bootstrap PATH``: the command line of PID 1."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

    from sandbox_runtime.logs import Log

_USAGE = "usage: openshell-sandbox --bootstrap PATH"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sandbox runtime. Returns the exit code, of which ``errors.RuntimeExit`` tells the meaning.

    Args:
        arguments: The command line without the program's name; the process's own by default.
    """
    # First of all: PID 1 ignores what it has no handler for, and would take the whole stop grace.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end_at_once)
    arguments = sys.argv[1:] if arguments is None else arguments

    from sandbox_runtime.errors import RuntimeExit, SandboxRuntimeError
    from sandbox_runtime.logs import Log, level_from_environment

    log = Log(level_from_environment())
    try:
        return _run(_bootstrap_path(arguments), log)
    except SandboxRuntimeError as error:
        log.failure(str(error), reason=error.reason)
        return error.exit_code
    except Exception as error:
        import traceback

        where = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
        log.failure("The runtime failed", error=type(error).__name__, detail=str(error), where=where)
        return RuntimeExit.FAULT


def _end_at_once(number: int, _: FrameType | None) -> NoReturn:
    # Nothing has been started yet that would need an end.
    os._exit(128 + number)


def _bootstrap_path(arguments: Sequence[str]) -> str:
    from sandbox_runtime.errors import UsageError

    match arguments:
        case ["--bootstrap", path] if path:
            return path
        case [word] if word.startswith("--bootstrap=") and word != "--bootstrap=":
            return word.removeprefix("--bootstrap=")
        case ["--help" | "-h"]:
            sys.stdout.write(
                f"{_USAGE}\n\nPID 1 of a workload container: serves the Sandbox Protocol, runs the agent.\n"
            )
            raise SystemExit(0)
        case _:
            raise UsageError(f"the command line is not understood; {_USAGE}")


def _run(bootstrap_path: str, log: Log) -> int:
    from pathlib import Path

    from sandbox_runtime import hardening, landlock
    from sandbox_runtime.errors import PlatformError, PrivilegeError

    facts = hardening.read_own_facts()
    objections = hardening.privilege_objections(facts)
    if objections:
        raise PrivilegeError(f"refusing to run with more privilege than a workload may have: {'; '.join(objections)}")
    hardening.hide_from_equals()
    os.umask(0o077)
    abi = landlock.kernel_abi()
    if abi < landlock.MINIMUM_ABI:
        raise PlatformError(
            f"the kernel offers Landlock ABI {abi}, {landlock.MINIMUM_ABI} or newer is needed "
            "(Linux 6.2 or newer, Landlock enabled, let through by the seccomp profile)"
        )

    from sandbox_runtime.bootstrap import consume

    provisioned = consume(Path(bootstrap_path))
    identity = provisioned.bootstrap.workload_identity
    objections = hardening.identity_objections(
        facts, uid=identity.uid, gid=identity.gid, supplementary_gids=identity.supplementary_gids
    )
    if objections:
        raise PrivilegeError(f"this container does not run as it was provisioned: {'; '.join(objections)}")

    import asyncio

    from sandbox_runtime.serve import STOP_SIGNALS, serve
    from sandbox_runtime.signals import SignalInbox

    # Blocks the signals, so before any other thread exists.
    inbox = SignalInbox((*STOP_SIGNALS, signal.SIGCHLD))
    code = asyncio.run(serve(provisioned, inbox, log))
    log.info("Ending", exit_code=int(code))
    sys.stderr.flush()
    # Not by way of the interpreter's end: it would wait for threads that have nothing left to do.
    os._exit(code)
