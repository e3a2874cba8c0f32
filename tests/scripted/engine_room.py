"""A Docker Engine of a test's own, ended and started again under its containers.

The engine runs in a room: network, mount and process namespaces of its own. Its data is in memory there, the fixed
paths of dockerd and containerd are covered, and only its socket and its log are outside. The room's first process
starts and ends the engine as it is told on its standard input, and when that is closed, even by a SIGKILL of the test,
it ends, and with it the kernel ends every process and every mount of the room.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from devtools import control_groups, kernel
from devtools.environment import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

_PROGRAMS = ("dockerd", "unshare", "mount")
_FOLDERS = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PATIENCE_SECONDS = 60.0
_READY = b"READY=1"


def why_impossible() -> str:
    """Why no engine can be had here; empty where one can."""
    if os.geteuid() != 0:
        return "an engine of the test's own needs root"
    path = f"{os.environ.get('PATH', '')}:{_FOLDERS}"
    missing = [name for name in _PROGRAMS if shutil.which(name, path=path) is None]
    return f"an engine of the test's own needs {', '.join(missing)}" if missing else ""


@dataclass(frozen=True, slots=True)
class EngineRoom:
    """Starts and ends the engine; each method returns when it is done."""

    folder: Path
    process: subprocess.Popen[str]

    @property
    def docker_host(self) -> str:
        """The engine's address, the same each time it runs."""
        return f"unix://{_socket(self.folder)}"

    @property
    def log(self) -> str:
        """What the engine has logged."""
        return _log(self.folder).read_text("utf-8", "replace")

    def start(self, *, live_restore: bool) -> None:
        """Start the engine, and return when it serves; one that runs already is left as it is."""
        self._ask(f"start {int(live_restore)}")

    def end(self, number: signal.Signals) -> None:
        """Send the engine a signal and wait for its end; one that does not run is no fault."""
        self._ask(f"end {number}")

    def signal(self, pid: int, number: signal.Signals) -> None:
        """Send a process of the room, by its number in there, a signal, and wait for its end."""
        self._ask(f"signal {pid} {number}")

    def runs(self, pid: int) -> bool:
        """Whether a process of the room, by its number in there, runs."""
        return self._ask(f"runs {pid}") == "yes"

    def kill_containerd(self) -> None:
        """Kill the engine's containerd, which the engine starts again."""
        self._ask("containerd")

    def cut_power(self) -> None:
        """Kill the engine and everything that it started at once."""
        self._ask("cut")

    def _ask(self, line: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> str:
        """The room's next line."""
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            assert selector.select(2 * _PATIENCE_SECONDS), self.log
        answer = self.process.stdout.readline().strip()
        assert answer.startswith("done"), f"{answer}\n{self.log}"
        return answer.removeprefix("done").strip()


@contextmanager
def running_room() -> Iterator[EngineRoom]:
    """A room without an engine yet; nothing of it is left afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="room-"))
    _log(folder).touch()
    group = f"openshell-docker-room-{secrets.token_hex(4)}"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DOCKER_")}
    environment["PYTHONPATH"] = f"{ROOT}:{ROOT / 'tests'}"
    environment["PATH"] = f"{environment.get('PATH', '')}:{_FOLDERS}"
    namespaces = ("--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private")
    process = subprocess.Popen(
        ["unshare", *namespaces, sys.executable, "-m", "scripted.engine_room", str(folder), group],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    )
    room = EngineRoom(folder=folder, process=process)
    try:
        room.answer()
        yield room
    finally:
        try:
            process.communicate(timeout=_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()  # and with it, everything in the room
            process.communicate()
            raise
        assert process.returncode == 0
        assert not folder.exists()


def _socket(folder: Path) -> Path:
    return folder / "docker.sock"


def _log(folder: Path) -> Path:
    return folder / "engine.log"


class _FirstProcess:
    """What runs in the room: process 1 of its namespace, and so the parent of every orphan in it."""

    def __init__(self, folder: Path, group: str) -> None:
        self._folder, self._group = folder, group
        self._room = folder / "room"
        self._notify: socket.socket | None = None
        self._dockerd = 0

    def run(self) -> None:
        signal.signal(signal.SIGCHLD, self._reap)
        self._furnish()
        print("done", flush=True)
        for line in iter(sys.stdin.readline, ""):
            verb, *words = line.split()
            numbers = [int(word) for word in words]
            try:
                print("done", getattr(self, f"_{verb}")(*numbers) or "", flush=True)
            except OSError as error:
                print(f"failed: {line.strip()}: {error}", flush=True)
        self._cut()
        control_groups.remove(self._group)
        kernel.detach(str(self._room))
        shutil.rmtree(self._folder)  # also where the test cannot, since it was killed

    def _furnish(self) -> None:
        """Cover what dockerd and containerd use whatever their options say."""
        self._room.mkdir()
        kernel.mount("tmpfs", str(self._room), "mode=711")
        kernel.mount("tmpfs", "/run", "mode=755")
        for covered in (Path("/etc/docker"), Path("/opt/containerd")):
            # Over an overlay, so that a folder that is not there is made in the room alone.
            upper, work = self._room / f"{covered.name}-upper", self._room / f"{covered.name}-work"
            upper.mkdir()
            work.mkdir()
            options = f"lowerdir={covered.parent},upperdir={upper},workdir={work}"
            kernel.mount("overlay", str(covered.parent), options)
            covered.mkdir(exist_ok=True)
            kernel.mount("tmpfs", str(covered), "mode=711")
        control_groups.ensure_mounted()
        (self._room / "daemon.json").write_text("{}\n", "utf-8")
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notify.bind(str(self._room / "notify.sock"))
        self._notify.settimeout(0.2)

    def _start(self, live_restore: int) -> None:
        if self._dockerd and _is_there(self._dockerd):
            return
        with _log(self._folder).open("ab") as log:
            self._dockerd = subprocess.Popen(
                [
                    "dockerd",
                    f"--config-file={self._room / 'daemon.json'}",
                    f"--data-root={self._room / 'data'}",
                    f"--exec-root={self._room / 'exec'}",
                    f"--pidfile={self._room / 'docker.pid'}",
                    f"--host=unix://{_socket(self._folder)}",
                    "--group=root",
                    # Nobody else is in this network namespace, whose interfaces dockerd may well change.
                    "--bridge=none",
                    "--iptables=false",
                    "--ip6tables=false",
                    "--ip-forward=false",
                    "--ip-masq=false",
                    f"--cgroup-parent=/{self._group}",
                    "--exec-opt=native.cgroupdriver=cgroupfs",
                    "--log-level=warn",
                    *(["--live-restore"] if live_restore else []),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {"NOTIFY_SOCKET": str(self._room / "notify.sock")},
            ).pid
        deadline = time.monotonic() + _PATIENCE_SECONDS
        assert self._notify is not None
        while not self._told_ready():
            if not _is_there(self._dockerd) or time.monotonic() > deadline:
                raise OSError("the engine did not come up")

    def _told_ready(self) -> bool:
        assert self._notify is not None
        with contextlib.suppress(TimeoutError):
            return _READY in self._notify.recv(4096)
        return False

    def _end(self, number: int) -> None:
        if self._dockerd:
            _send_and_wait(self._dockerd, number)
            self._dockerd = 0

    @staticmethod
    def _signal(pid: int, number: int) -> None:
        _send_and_wait(pid, number)

    @staticmethod
    def _runs(pid: int) -> str:
        return "yes" if _is_there(pid) else "no"

    @staticmethod
    def _containerd() -> None:
        found = [pid for pid in _processes() if _name(pid) == "containerd"]
        if not found:
            raise OSError("the engine has no containerd of its own")
        for pid in found:
            _send_and_wait(pid, signal.SIGKILL)

    def _cut(self) -> None:
        self._dockerd = 0
        others = _processes()
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        for pid in others:
            _wait(pid)

    @staticmethod
    def _reap(_number: int, _frame: object) -> None:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _processes() -> list[int]:
    """The other processes of the room."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if pid != os.getpid()]


def _name(pid: int) -> str:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/comm").read_text("utf-8").strip()
    return ""


def _is_there(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0] not in {"Z", "X"}
    return False


def _send_and_wait(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        _wait(pid)


def _wait(pid: int) -> None:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(handle, selectors.EVENT_READ)
            if not selector.select(_PATIENCE_SECONDS):
                raise OSError(f"process {pid} does not end")
    finally:
        os.close(handle)


if __name__ == "__main__":
    _FirstProcess(Path(sys.argv[1]), sys.argv[2]).run()
