"""The process that runs the private engine, and ends it when its owner is gone, however that went.

Its owner, ``./dev``, holds the writing end of the keeper's stdin and never writes: the end of that pipe means that the
owner has ended, even by SIGKILL. The keeper tells on stdout: one line ``ready``, or ``failed`` and why. It has

* a mount namespace of its own, so that no mount of the engine is ever seen outside, and all end with it;
* empty folders mounted over the fixed paths where dockerd and containerd keep things for the whole machine, so that
  nothing is left there, no configuration of the machine's is read, and a system containerd is never used;
* the orphans of its descendants as children: no shim or container escapes.

It inherits the lock of the engine's folder, so the next ``./dev`` waits until all is cleaned up.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from devtools import control_groups, engine_remains, kernel
from devtools.engine_record import EngineRecord, ProcessIdentity

COVERED_FOLDERS = ("/etc/docker", "/opt/containerd", "/run/docker", "/run/containerd")
"""Paths that dockerd and containerd use whatever their options say."""

_SHUTDOWN_SECONDS = 20.0
_REAP_SECONDS = 10.0


def dockerd_command(record: EngineRecord) -> list[str]:
    """The command line of the private engine."""
    run = Path(record.run_folder)
    return [
        "dockerd",
        f"--config-file={run / 'daemon.json'}",
        f"--data-root={record.data_folder}",
        f"--exec-root={run / 'exec'}",
        f"--pidfile={run / 'docker.pid'}",
        f"--host=unix://{record.socket}",
        "--group=root",
        f"--bridge={record.bridge or 'none'}",
        "--iptables=false",
        "--ip6tables=false",
        "--ip-forward=false",
        "--ip-masq=false",
        "--userland-proxy=false",
        f"--cgroup-parent=/{record.control_group}",
        "--exec-opt=native.cgroupdriver=cgroupfs",
        "--shutdown-timeout=5",
        "--log-level=warn",
    ]


class Keeper:
    """Starts dockerd, waits for its readiness or its owner's end, and cleans up."""

    def __init__(self, record: EngineRecord, record_path: Path) -> None:
        self._record = record
        self._record_path = record_path
        self._dockerd = 0
        self._status: int | None = None
        self._asked = False
        self._wakeup_read, self._wakeup_write = socket.socketpair()
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def run(self) -> int:
        """Run the engine until the owner is gone, a signal comes, or the engine ends by itself.

        Returns:
            0 where it was asked to end, else 1.
        """
        try:
            self._start()
            self._watch()
        except OSError as error:
            self._tell(f"failed {error}")
        finally:
            self._clean_up()
        return 0 if self._asked else 1

    def _start(self) -> None:
        for channel in (self._wakeup_read, self._wakeup_write):
            channel.setblocking(False)
        signal.set_wakeup_fd(self._wakeup_write.fileno())
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        kernel.adopt_orphans()
        kernel.leave_mount_namespace()
        for folder in COVERED_FOLDERS:
            kernel.mount("tmpfs", folder, "mode=711")
        control_groups.ensure_mounted()
        run = Path(self._record.run_folder)
        (run / "daemon.json").write_text("{}\n", "utf-8")
        self._notify.bind(str(run / "notify.sock"))
        environment = {name: value for name, value in os.environ.items() if not name.startswith("DOCKER_")}
        environment["NOTIFY_SOCKET"] = str(run / "notify.sock")
        environment["PATH"] = f"{environment.get('PATH', os.defpath)}:/usr/sbin:/sbin:/usr/bin:/bin"
        process = subprocess.Popen(
            dockerd_command(self._record),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            # Only this thread exists, so code before exec is safe; a killed keeper takes dockerd along.
            preexec_fn=lambda: kernel.end_with_parent(signal.SIGTERM),  # noqa: PLW1509
        )
        self._dockerd = process.pid
        processes = (ProcessIdentity.of(os.getpid()), ProcessIdentity.of(process.pid))
        self._record.with_processes(*processes).write(self._record_path)

    def _on_signal(self, number: int, _frame: object) -> None:
        if number == signal.SIGTERM:
            self._asked = True

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(sys.stdin, selectors.EVENT_READ, "owner")
            selector.register(self._notify, selectors.EVENT_READ, "notify")
            selector.register(self._wakeup_read, selectors.EVENT_READ, "signal")
            while not self._asked:
                for key, _ in selector.select():
                    if key.data == "owner" and not os.read(sys.stdin.fileno(), 64):
                        self._asked = True
                    elif key.data == "notify" and b"READY=1" in self._notify.recv(4096):
                        self._tell("ready")
                    elif key.data == "signal":
                        with suppress(BlockingIOError):
                            self._wakeup_read.recv(4096)
                        self._reap()
                if self._status is not None:
                    self._tell(f"failed dockerd ended with exit code {os.waitstatus_to_exitcode(self._status)}")
                    return

    def _tell(self, line: str) -> None:
        with suppress(BrokenPipeError):
            print(line, flush=True)

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._dockerd:
                    self._status = status

    def _clean_up(self) -> None:
        # Not by the engine's orderly stop, which waits ten seconds for a container that ignores SIGTERM.
        engine_remains.kill_all(engine_remains.processes_of(self._record, contained_only=True))
        identity = ProcessIdentity.of(self._dockerd) if self._dockerd and self._status is None else None
        if identity is not None:
            engine_remains.end(identity, _SHUTDOWN_SECONDS)
        deadline = time.monotonic() + _REAP_SECONDS
        self._reap()
        while time.monotonic() < deadline:
            rest = engine_remains.processes_of(self._record)
            if not rest:
                break
            engine_remains.kill_all(rest)
            self._reap()
        for folder in COVERED_FOLDERS:
            with suppress(OSError):
                kernel.detach(folder)
        engine_remains.remove_traces(self._record)
        self._record_path.unlink(missing_ok=True)
        for channel in (self._notify, self._wakeup_read, self._wakeup_write):
            channel.close()


def main() -> int:
    """Run the engine that the record at the path in the first argument describes."""
    path = Path(sys.argv[1])
    record = EngineRecord.read(path)
    if record is None:
        print(f"failed there is no usable record at {path}", flush=True)
        return 1
    return Keeper(record, path).run()


if __name__ == "__main__":
    sys.exit(main())
