"""The gateway and the driver as real processes, for as long as a benchmark runs."""

from __future__ import annotations

import contextlib
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_START_SECONDS = 60.0
_STOP_SECONDS = 10.0


class ProcessError(RuntimeError):
    """A process did not start; the text ends with its last lines."""


class Running:
    """A process whose standard output is read line by line."""

    def __init__(self, arguments: Sequence[str], *, log: Path) -> None:
        executable = Path(sys.executable).with_name(arguments[0])
        self._name, self._log = arguments[0], log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [str(executable), *arguments[1:]],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, name=f"{self._name}-output")
        self._reader.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def expect(self, prefix: str) -> str:
        """Wait for a line that starts with the prefix and return the rest of it."""
        while True:
            try:
                line = self._lines.get(timeout=_START_SECONDS)
            except queue.Empty:
                raise ProcessError(f"{self._name} did not say {prefix!r} in time{self._tail()}") from None
            if line is None:
                raise ProcessError(f"{self._name} ended with code {self._process.wait()}{self._tail()}")
            if line.startswith(prefix):
                return line.removeprefix(prefix).strip()

    def stop(self) -> None:
        """End it in order, or kill it where it does not end."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()

    def _read(self) -> None:
        output = self._process.stdout
        if output is not None:
            with output:
                for line in output:
                    self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def _tail(self) -> str:
        lines = self._log.read_text("utf-8", errors="replace").splitlines()[-15:]
        return "".join(f"\n  {line}" for line in lines)


class Driver:
    """The driver's process, which can be stopped and started again over the same state."""

    def __init__(self, socket: Path, arguments: Sequence[str], *, log: Path) -> None:
        self.socket = socket
        self._arguments = arguments
        self._log = log
        self._running = self._start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._running.pid

    def stop(self) -> None:
        """End it in order; its sandboxes go on. Idempotent."""
        self._running.stop()

    def start(self) -> None:
        """Run it again after a stop."""
        self._running = self._start()

    def _start(self) -> Running:
        running = Running(self._arguments, log=self._log)
        running.expect("serving on ")
        return running


@contextlib.contextmanager
def gateway_and_driver(
    folder: Path, *, docker_host: str, namespace: str, workload: str, runtime: str, supervisor: str
) -> Iterator[tuple[str, Driver]]:
    """Run both; yields the gateway's endpoint and the driver.

    Args:
        folder: An owner-only folder for sockets, state and logs.
        docker_host: Address of the engine.
        namespace: The driver's sandbox label.
        workload: Default image.
        runtime: Image of the sandbox runtime.
        supervisor: Image of the supervisor.
    """
    socket = folder / "driver" / "driver.sock"
    with contextlib.ExitStack() as stack:
        gateway = Running(
            ["openshell-gateway", "serve", "--listen", "127.0.0.1:0", "--state-dir", str(folder / "gateway"),
             "--compute-driver", "docker", "--compute-driver-socket", str(socket), "--client-config", "none",
             "--log-level", "warning"],
            log=folder / "gateway.log",
        )  # fmt: skip
        stack.callback(gateway.stop)
        endpoint = gateway.expect("listening on ")
        driver = Driver(
            socket,
            ["openshell-driver-docker", "serve", "--bind-socket", str(socket), "--docker-socket", docker_host,
             "--grpc-endpoint", endpoint, "--supervisor-image", supervisor, "--sandbox-runtime-image", runtime,
             "--default-image", workload, "--sandbox-label", namespace, "--state-dir", str(folder / "state")],
            log=folder / "driver.log",
        )  # fmt: skip
        stack.callback(driver.stop)
        gateway.expect("ready")
        yield endpoint, driver
