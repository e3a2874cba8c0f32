"""A Docker Engine of our own, for machines where none answers.

Its data lives in the cache folder (``…/engine``), its sockets in a short owner-only folder; it shares the machine's
network namespace, because supervisors on the host's network must reach a gateway on loopback. One private engine runs
at a time for a cache folder: a second ``./dev`` waits for the first to end, since the engine ends with its owner.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from devtools import bridge, debian, engine_remains
from devtools.console import Progress, say, tail_of
from devtools.engine_discovery import why_unusable
from devtools.engine_keeper import COVERED_FOLDERS
from devtools.engine_record import EngineRecord, ProcessIdentity, boot_id
from devtools.environment import ROOT
from devtools.errors import EngineFailedError, PreconditionError

if TYPE_CHECKING:
    from collections.abc import Iterator

START_TIMEOUT_SECONDS = 90.0
END_TIMEOUT_SECONDS = 60.0
PACKAGE = "docker.io"
_UNITS = ("docker.service", "docker.socket", "containerd.service")
_PROGRAM_FOLDERS = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SHORT_FOLDERS = (Path("/run"), Path("/tmp"))  # noqa: S108 - mkdtemp makes an owner-only folder in it


def ensure_dockerd(log: Path) -> None:
    """Have a ``dockerd`` program, by installing the distribution's package where allowed.

    Raises:
        PreconditionError: There is none and it may not be installed, or we are not root.
        StepFailedError: The installation failed.
    """
    if os.geteuid() != 0:
        raise PreconditionError("no Docker Engine answers, and starting a private one needs root.\n" + _ADVICE)
    if has_dockerd():
        return
    if not debian.may_install():
        raise PreconditionError("no Docker Engine answers, and none is installed that could be started.\n" + _ADVICE)
    debian.install([PACKAGE], purpose="no Docker Engine answers; its service is not started", log=log)
    debian.leave_disabled(_UNITS)
    if not has_dockerd():
        raise PreconditionError(f"{PACKAGE} is installed, but brought no dockerd.\n" + _ADVICE)


_ADVICE = (
    "What to do: start a Docker Engine (20.10 or later) that this user may use, for instance with "
    "`sudo systemctl start docker` and membership in the group docker; or name one in DOCKER_HOST; or, on a Debian "
    "family system, run ./dev as root, which installs and runs a private engine. `./dev test --no-engine` needs none."
)


def has_dockerd() -> bool:
    """Whether the engine's program is installed."""
    return shutil.which("dockerd", path=f"{os.environ.get('PATH', '')}:{_PROGRAM_FOLDERS}") is not None


@contextmanager
def private_engine(cache: Path) -> Iterator[str]:
    """Run a private engine for the block.

    Args:
        cache: The cache folder; the engine's data is kept in its ``engine`` folder.

    Yields:
        The engine's address.

    Raises:
        PreconditionError: It cannot be had on this machine.
        EngineFailedError: It did not start in time.
    """
    folder = cache / "engine"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _alone(folder / "lock") as lock:
        record_path = folder / "record.json"
        ended = engine_remains.reclaim(record_path)
        if ended:
            say(f"an earlier ./dev was killed; ended what it left: {', '.join(ended)}")
        ensure_dockerd(folder / "apt.log")
        running = _start_or_start_afresh(folder, record_path, lock)
        try:
            yield f"unix://{running.record.socket}"
        finally:
            _end(running, record_path)


@contextmanager
def _alone(path: Path) -> Iterator[IO[str]]:
    with path.open("a+", encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.seek(0)
            owner = handle.read().strip() or "unknown"
            say(f"another ./dev (process {owner}) has the private engine; waiting until it ends")
            fcntl.flock(handle, fcntl.LOCK_EX)
        handle.seek(0)
        handle.truncate()
        handle.write(f"{os.getpid()}\n")
        handle.flush()
        yield handle


@dataclass(frozen=True, slots=True, kw_only=True)
class _Running:
    """A started keeper."""

    process: subprocess.Popen[bytes]
    record: EngineRecord
    log: Path


def _start_or_start_afresh(folder: Path, record_path: Path, lock: IO[str]) -> _Running:
    data = folder / "data"
    is_used = data.exists()
    try:
        return _start(folder, record_path, lock)
    except EngineFailedError as error:
        if not is_used:
            raise
        say(f"the private engine did not start ({str(error).splitlines()[0]}); trying once more with fresh data")
        shutil.rmtree(data, ignore_errors=True)
        return _start(folder, record_path, lock)


def _make_folders() -> tuple[str, ...]:
    """Have the folders that the keeper covers; those made are named, to be removed afterwards."""
    made: list[str] = []
    for name in COVERED_FOLDERS:
        folder = Path(name)
        for path in (*reversed(folder.parents), folder):
            with suppress(FileExistsError):
                path.mkdir(mode=0o755)
                made.append(str(path))
    return tuple(made)


def _record(folder: Path) -> EngineRecord:
    parent = next((path for path in _SHORT_FOLDERS if os.access(path, os.W_OK)), Path(tempfile.gettempdir()))
    name = secrets.token_hex(4)
    run = tempfile.mkdtemp(prefix="osd-", dir=parent)
    return EngineRecord(
        boot_id=boot_id(),
        data_folder=str(folder / "data"),
        run_folder=run,
        control_group=f"openshell-docker-{name}",
        bridge=f"osd-{name}" if bridge.needs_own_bridge() else "",
        made_folders=_make_folders(),
    )


def _start(folder: Path, record_path: Path, lock: IO[str]) -> _Running:
    record = _record(folder)
    log = folder / "engine.log"
    title = "starting a private Docker Engine" + (
        f" with a bridge of its own, {record.bridge}" if record.bridge else ""
    )
    progress = Progress(title)
    process: subprocess.Popen[bytes] | None = None
    try:
        record.write(record_path)
        if record.bridge:
            bridge.create(record.bridge)
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "devtools.engine_keeper", str(record_path)],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,
                pass_fds=(lock.fileno(),),
            )
        running = _Running(process=process, record=record, log=log)
        _await_ready(running, progress)
    except OSError as error:
        _end_process(process)
        engine_remains.reclaim(record_path)
        raise EngineFailedError(f"the private Docker Engine could not be started: {error}") from error
    except BaseException:
        _end_process(process)
        engine_remains.reclaim(record_path)
        raise
    progress.end()
    return running


def _await_ready(running: _Running, progress: Progress) -> None:
    output = running.process.stdout
    if output is None:
        raise EngineFailedError("the keeper has no output")
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    with selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        while not selector.select(timeout=1.0):
            progress.tick()
            if time.monotonic() > deadline:
                raise EngineFailedError(_failure(running.log, f"it is not ready after {START_TIMEOUT_SECONDS:.0f} s"))
    line = output.readline().decode("utf-8", "replace").strip()
    if line != "ready":
        raise EngineFailedError(_failure(running.log, line.removeprefix("failed ") or "its keeper ended"))
    reason = why_unusable(f"unix://{running.record.socket}", timeout_seconds=30.0)
    if reason is not None:
        raise EngineFailedError(_failure(running.log, f"it says ready, but: {reason}"))


def _failure(log: Path, reason: str) -> str:
    return f"the private Docker Engine did not start: {reason}\nThe end of {log}:\n{tail_of(log)}"


def _end(running: _Running, record_path: Path) -> None:
    early = running.process.poll() is not None
    progress = Progress("ending the private Docker Engine")
    _end_process(running.process)
    engine_remains.reclaim(record_path)
    progress.end()
    if early:
        say(f"the private engine had ended by itself; the end of {running.log}:\n{tail_of(running.log)}")


def _end_process(process: subprocess.Popen[bytes] | None) -> None:
    """Let the keeper clean up by closing the pipe that it watches; kill it where it does not end in time."""
    if process is None:
        return
    for channel in (process.stdin, process.stdout):
        if channel is not None:
            channel.close()
    try:
        process.wait(END_TIMEOUT_SECONDS)
    except BaseException:
        identity = ProcessIdentity.of(process.pid)
        if identity is not None:
            engine_remains.end(identity)
        process.wait()
        raise
