"""What processes consume, as the kernel counts it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

_ENGINE_PROGRAMS: Final = frozenset({"dockerd", "containerd", "containerd-shim", "docker-proxy"})
_COMM_LENGTH: Final = 15
"""The kernel keeps this much of a program's name."""
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


def engine_processes() -> tuple[int, ...]:
    """The engine's own processes on this machine, the containers' shims among them."""
    return tuple(pid for pid in _processes() if _is_engine(pid))


def cpu_seconds(pids: Iterable[int]) -> float:
    """CPU time that processes have used so far; one that is gone counts nothing."""
    total = 0
    for pid in pids:
        try:
            total += time.clock_gettime_ns((~pid << 3) | _CPU_CLOCK_OF_PROCESS)
        except OSError:
            continue
    return total / 1e9


def _processes() -> Iterable[int]:
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def _is_engine(pid: int) -> bool:
    try:
        name = Path(f"/proc/{pid}/comm").read_text("utf-8").rstrip("\n")
    except OSError:
        return False
    return name in _ENGINE_PROGRAMS or name == "containerd-shim-runc-v2"[:_COMM_LENGTH]
