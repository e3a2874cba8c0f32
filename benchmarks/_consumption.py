"""What processes consume, as the kernel counts it."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from collections.abc import Set as AbstractSet

_CREDENTIALS: Final = struct.Struct("3i")
_SHIM: Final = "containerd-shim"
_CPU_CLOCK_OF_PROCESS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What one process holds."""

    threads: int
    descriptors: int
    resident_bytes: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        """Read it from the kernel."""
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text("utf-8").splitlines() if ":" in line
        )
        return cls(
            threads=int(status["Threads"]),
            descriptors=sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir()),
            resident_bytes=int(status["VmRSS"].split()[0]) * 1024,
        )


def engine_processes(docker_host: str, containers: AbstractSet[str]) -> tuple[int, ...]:
    """The engine's own processes: the daemon, its containerd, and the shims of these containers.

    Args:
        docker_host: The engine's address, which must be a socket on this machine.
        containers: Ids of running containers.

    Raises:
        RuntimeError: The engine's processes cannot be seen from here.
    """
    if not docker_host.startswith("unix://"):
        raise RuntimeError(f"the processes of the engine at {docker_host} cannot be seen; use one on a Unix socket")
    shims = {pid: words for pid, words in _programs() if _SHIM in words[0] and containers & set(words)}
    if not shims:
        raise RuntimeError(f"the engine at {docker_host} runs its containers where their shims cannot be seen")
    words = next(iter(shims.values()))
    containerd = _listener(words[words.index("-address") + 1])
    return (_listener(docker_host.removeprefix("unix://")), containerd, *shims)


def cpu_seconds(pids: Iterable[int]) -> float:
    """CPU time that processes have used so far; one that is gone counts nothing."""
    total = 0
    for pid in pids:
        try:
            total += time.clock_gettime_ns((~pid << 3) | _CPU_CLOCK_OF_PROCESS)
        except OSError:
            continue
    return total / 1e9


def _listener(socket_path: str) -> int:
    """The process that listens on a socket."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(socket_path)
        pid, _, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(pid)


def _programs() -> Iterator[tuple[int, list[str]]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                yield int(entry.name), (entry / "cmdline").read_text("utf-8", errors="replace").split("\0")
