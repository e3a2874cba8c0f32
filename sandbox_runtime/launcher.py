"""The exec launcher: a short-lived process that confines itself and then becomes the agent.

It exists because PID 1 has threads and must not run Python between fork and exec. PID 1 starts it by posix_spawn with
three descriptors: instructions (JSON, so that nothing secret is in arguments or environment), a status pipe, and the
Landlock ruleset. The status pipe closes by itself when execve succeeds; before that it carries either the word that
everything is prepared or what failed. This module runs in front of every agent, so it imports little.
"""

from __future__ import annotations

import errno
import json
import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn, TypedDict

    class Instructions(TypedDict):
        """What PID 1 tells the launcher."""

        arguments: list[str]
        """The program, by path or by name, and its arguments."""
        environment: dict[str, str]
        working_directory: str
        default_path: str
        """Where a program without a slash is looked for when the environment has no PATH."""
        terminal: bool
        """Whether descriptor 0 is a terminal that becomes the session's own."""
        limits: list[tuple[str, int, int]]
        """Name (RLIMIT_…), soft and hard value."""

    class Report(TypedDict):
        """What the launcher tells PID 1 when it could not become the program."""

        stage: str
        """instructions, session, limits, working directory, lookup, confinement or execute."""
        path: str
        errno: int
        existed: bool
        """Whether something is at the path."""
        was_executable: bool
        """Whether it could be executed before the filesystem policy applied."""


INSTRUCTIONS_FD = 3
STATUS_FD = 4
RULESET_FD = 5
PREPARED = b"prepared\n"
"""Written to the status pipe right before the first execve."""
CANNOT_EXECUTE = 126
NOT_FOUND = 127
OOM_SCORE_ADJUSTMENT = 500
"""Of the agent and all that it starts; anybody may raise it, nobody without privilege may lower it again."""
_KEPT_OPEN = frozenset(range(RULESET_FD + 1))
_LARGEST_INSTRUCTIONS_BYTES = 8 * 1024 * 1024


def main() -> NoReturn:
    """Follow the instructions on the inherited descriptors; ends as the agent, or with 126 or 127."""
    stage, path = "instructions", ""
    code = CANNOT_EXECUTE
    try:
        for fd in (INSTRUCTIONS_FD, STATUS_FD, RULESET_FD):
            os.set_inheritable(fd, False)
        _close_strays()
        instructions = _read_instructions()

        stage = "session"
        _default_signals()
        os.setsid()
        if instructions["terminal"]:
            _take_terminal()
        os.umask(0o022)

        _offer_to_oom_killer()
        stage = "limits"
        for name, soft, hard in instructions["limits"]:
            path = name
            _limit(name, soft, hard)

        stage, path = "working directory", instructions["working_directory"]
        os.chdir(path)

        stage, path = "lookup", instructions["arguments"][0]
        candidates = _candidates(path, instructions["environment"].get("PATH", instructions["default_path"]))
        executable = frozenset(name for name in candidates if _is_executable(name))

        stage, path = "confinement", ""
        from sandbox_runtime import landlock

        landlock.forbid_new_privileges()
        landlock.restrict_self(RULESET_FD)

        stage, path = "execute", instructions["arguments"][0]
        os.write(STATUS_FD, PREPARED)
        number, path = _execute(candidates, instructions)
        existed = os.path.lexists(path)
        if number in (errno.ENOENT, errno.ENOTDIR) and not existed:
            code = NOT_FOUND
        _report(stage, path, number, existed=existed, was_executable=path in executable)
    except OSError as error:
        _report(stage, path, error.errno or errno.EINVAL)
    except (LookupError, TypeError, ValueError):
        _report(stage, path, errno.EINVAL)
    os._exit(code)


def _close_strays() -> None:
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - pathlib costs start time
        fd = int(name)
        if fd not in _KEPT_OPEN:
            try:
                os.close(fd)
            except OSError:
                continue  # the listing's own descriptor


def _read_instructions() -> Instructions:
    with os.fdopen(INSTRUCTIONS_FD, "rb") as stream:
        instructions: Instructions = json.loads(stream.read(_LARGEST_INSTRUCTIONS_BYTES))
    return instructions


def _default_signals() -> None:
    # Python ignores some for itself, and what is ignored stays ignored across execve.
    for number in signal.valid_signals():
        if signal.getsignal(number) not in (signal.SIG_DFL, None):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _offer_to_oom_killer() -> None:
    """When memory runs out the kernel shall take the agent, not PID 1, who would take everything with it."""
    try:
        with open("/proc/self/oom_score_adj", "r+") as stream:  # noqa: PTH123 - pathlib costs start time
            score = int(stream.read())
            stream.seek(0)
            stream.write(str(max(score, OOM_SCORE_ADJUSTMENT)))
    except (OSError, ValueError):
        return  # an advantage, not a control


def _limit(name: str, soft: int, hard: int) -> None:
    import resource

    resource.setrlimit(getattr(resource, name), (soft, hard))


def _candidates(program: str, search_path: str) -> list[str]:
    if "/" in program:
        return [program]
    return [f"{folder or '.'}/{program}" for folder in search_path.split(":")]


def _is_executable(path: str) -> bool:
    return os.access(path, os.X_OK) and not os.path.isdir(path)  # noqa: PTH112 - pathlib costs start time


def _execute(candidates: list[str], instructions: Instructions) -> tuple[int, str]:
    """Become the first candidate that can be executed. Returns only on failure: the errno and the path to blame."""
    failure = (errno.ENOENT, instructions["arguments"][0])
    for path in candidates:
        try:
            os.execve(path, instructions["arguments"], instructions["environment"])  # noqa: S606 - its whole purpose
        except OSError as error:
            number = error.errno or errno.EINVAL
            if number in (errno.ENOENT, errno.ENOTDIR):
                if len(candidates) == 1 or os.path.lexists(path):
                    failure = (number, path)  # it is there, but what should interpret it is not
            elif number == errno.EACCES:
                if failure[0] != errno.EACCES:
                    failure = (number, path)
            else:
                return number, path
    return failure


def _report(stage: str, path: str, number: int, *, existed: bool = False, was_executable: bool = False) -> None:
    report: Report = {
        "stage": stage,
        "path": path,
        "errno": number,
        "existed": existed,
        "was_executable": was_executable,
    }
    os.write(STATUS_FD, json.dumps(report).encode("ascii"))
