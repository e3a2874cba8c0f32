"""Starting a program in the container: PID 1's side of the exec launcher."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from openshell.isolation.errors import cause_of
from openshell.isolation.start_failures import StartFailure
from sandbox_runtime import launcher
from sandbox_runtime.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from sandbox_runtime.reaper import Child, Reaper

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Where programs are looked for when the environment has no PATH."""
EXEC_SECONDS = 10.0
"""How long the way from posix_spawn to the program's own first instruction may take."""
_LARGEST_REPORT_BYTES = 64 * 1024
_FIRST_SAFE_FD = 16  # above every descriptor number that the launcher expects
_MODULE_FOLDER = str(Path(__file__).resolve().parent.parent)
_SETTABLE_SIGNALS = frozenset(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP}
"""All of them: what PID 1 ignores, or inherited as ignored, would stay ignored across both executions."""
_BOOT = "import sys;sys.path.append(sys.argv[1]);from sandbox_runtime.launcher import main;main()"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceLimit:
    """One resource limit of the program."""

    name: str
    """The constant's name, such as RLIMIT_CORE."""
    soft: int
    hard: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What to run, and how."""

    arguments: tuple[str, ...]
    """The program, by path or by name, and its arguments."""
    environment: Mapping[str, str] = field(repr=False)
    working_directory: str
    ruleset_fd: int
    """The Landlock ruleset that confines it; stays the caller's."""
    standard_fds: tuple[int, int, int]
    """What becomes its stdin, stdout and stderr; stay the caller's."""
    terminal: bool = False
    """Whether its stdin is a terminal that becomes its session's own."""
    limits: tuple[ResourceLimit, ...] = (ResourceLimit(name="RLIMIT_CORE", soft=0, hard=0),)


async def launch(program: Program, reaper: Reaper) -> Child:
    """Start *program* and return once its own code runs.

    When this is cancelled, the process is killed; the reaper collects it.

    Raises:
        LaunchError: It could not be started; the text names the program or folder and the cause.
    """
    _refuse_unusable(program)
    with contextlib.ExitStack() as opened:

        def own(fd: int) -> int:
            opened.callback(os.close, fd)
            return fd

        try:
            instructions_fd = own(_high(_instructions_file(program)))
            status_fd, status_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            own(status_fd)
            status_write = _high(status_write)
        except OSError as error:
            raise LaunchError(f"cannot start {program.arguments[0]}: {cause_of(error)}") from error
        try:
            sources = [own(_high(os.dup(fd))) for fd in program.standard_fds]
            sources += [instructions_fd, status_write, own(_high(os.dup(program.ruleset_fd)))]
            child = reaper.spawn(_spawner(sources))
        except OSError as error:
            raise LaunchError(f"cannot start the exec launcher: {cause_of(error)}") from error
        finally:
            os.close(status_write)
        try:
            async with asyncio.timeout(EXEC_SECONDS):
                told = await _read_to_end(status_fd)
        except TimeoutError:
            _kill(child)
            raise LaunchError(
                f"cannot execute {program.arguments[0]}: it was not running {EXEC_SECONDS:g} s after the request"
            ) from None
        except BaseException:
            _kill(child)
            raise
    if told == launcher.PREPARED:
        return child
    status = await child.wait()
    raise LaunchError(_words(program, told.removeprefix(launcher.PREPARED), str(status)))


def _refuse_unusable(program: Program) -> None:
    if not program.arguments or not program.arguments[0]:
        raise LaunchError("cannot execute an empty program name")
    if any("\0" in argument for argument in program.arguments):
        raise LaunchError("cannot execute: an argument holds a NUL character")
    for name, value in program.environment.items():
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise LaunchError(f"cannot execute {program.arguments[0]}: the environment entry {name!r} is not valid")
    if not program.working_directory.startswith("/") or "\0" in program.working_directory:
        raise LaunchError(f"cannot execute {program.arguments[0]}: the working directory is not an absolute path")


def _instructions_file(program: Program) -> int:
    instructions: launcher.Instructions = {
        "arguments": list(program.arguments),
        "environment": dict(program.environment),
        "working_directory": program.working_directory,
        "default_path": DEFAULT_PATH,
        "terminal": program.terminal,
        "limits": [(limit.name, limit.soft, limit.hard) for limit in program.limits],
    }
    fd = os.memfd_create("openshell-launch", os.MFD_CLOEXEC)
    # An anonymous file, not a pipe: it takes any size without anybody reading, and the write cannot block.
    with os.fdopen(os.dup(fd), "wb") as stream:
        stream.write(json.dumps(instructions).encode("ascii"))
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _high(fd: int) -> int:
    """Move *fd* out of the way of the numbers that the launcher expects."""
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_SAFE_FD)
    finally:
        os.close(fd)


def _spawner(sources: Sequence[int]) -> Callable[[], int]:
    """How to start the launcher with *sources* as its stdin, stdout, stderr, instructions, status pipe and ruleset."""
    targets = (0, 1, 2, launcher.INSTRUCTIONS_FD, launcher.STATUS_FD, launcher.RULESET_FD)
    arguments = [sys.executable, "-I", "-S", "-X", "utf8", "-c", _BOOT, _MODULE_FOLDER]

    def start() -> int:
        return os.posix_spawn(
            sys.executable,
            arguments,
            {},
            file_actions=[
                (os.POSIX_SPAWN_DUP2, source, target) for source, target in zip(sources, targets, strict=True)
            ],
            setsigmask=(),
            setsigdef=_SETTABLE_SIGNALS,
        )

    return start


async def _read_to_end(fd: int) -> bytes:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    collected = bytearray()

    def readable() -> None:
        try:
            data = os.read(fd, _LARGEST_REPORT_BYTES)
        except BlockingIOError:
            return
        collected.extend(data)
        if (not data or len(collected) > _LARGEST_REPORT_BYTES) and not ended.done():
            ended.set_result(None)

    loop.add_reader(fd, readable)
    try:
        await ended
    finally:
        loop.remove_reader(fd)
    return bytes(collected)


def _kill(child: Child) -> None:
    if child.status is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)


def _words(program: Program, told: bytes, ended: str) -> str:
    name = program.arguments[0]
    try:
        report: launcher.Report = json.loads(told)
        return explain(name, report, search_path=program.environment.get("PATH", DEFAULT_PATH))
    except (ValueError, LookupError, TypeError):
        return f"cannot execute {name}: the exec launcher {ended} without a report"


def explain(program: str, report: launcher.Report, *, search_path: str) -> str:
    """The launcher's report in words: what could not be done, with which file, and why."""
    stage, path, number = report["stage"], report["path"], report["errno"]
    cause = os.strerror(number).lower()
    if stage == "working directory":
        return f"cannot enter the working directory {path}: {cause}"
    if stage != "execute":
        return f"cannot prepare {program}: {stage}{f' {path}' if path else ''}: {cause}"
    if number in (errno.ENOENT, errno.ENOTDIR):
        if report["existed"]:
            return f"cannot execute {path}: {StartFailure.NO_INTERPRETER}"
        if "/" not in program:
            return f"cannot execute {program}: {StartFailure.NOT_IN_PATH} ({search_path})"
        return f"cannot execute {path}: {StartFailure.NOT_FOUND}"
    if number == errno.EACCES:
        if report["was_executable"]:
            return f"cannot execute {path}: {StartFailure.NOT_ALLOWED}"
        if report["existed"]:
            return f"cannot execute {path}: {StartFailure.NOT_EXECUTABLE}"
    if number == errno.ENOEXEC:
        return f"cannot execute {path}: {StartFailure.BAD_FORMAT}"
    return f"cannot execute {path}: {cause}"
