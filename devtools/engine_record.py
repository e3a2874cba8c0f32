"""What a private engine leaves a trace of on the machine, on disk before it exists, so that it can be taken back.

Standard library only: the keeper process loads quickly.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """A process that is still the same one only if its start time is, since numbers are given out again."""

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """The identity of a living process; ``None`` where there is none, or only its corpse."""
        try:
            text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
        except OSError:
            return None
        fields = text.rpartition(")")[2].split()
        return None if fields[0] in {"Z", "X"} else cls(pid=pid, start_ticks=int(fields[19]))

    def is_alive(self, *, mentioning: str) -> bool:
        """Whether it still runs, and its command line or control group mentions a text that only ours do."""
        return ProcessIdentity.of(self.pid) == self and mentioning in command_line(self.pid)


def command_line(pid: int) -> str:
    """Arguments of a process, separated by blanks; empty where it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    except OSError:
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRecord:
    """Everything to end or remove when a private engine is over."""

    boot_id: str
    data_folder: str
    run_folder: str
    control_group: str
    bridge: str = ""
    made_folders: tuple[str, ...] = ()
    keeper: ProcessIdentity | None = None
    dockerd: ProcessIdentity | None = None

    @property
    def socket(self) -> Path:
        """The engine's API socket."""
        return Path(self.run_folder) / "docker.sock"

    def with_processes(self, keeper: ProcessIdentity | None, dockerd: ProcessIdentity | None) -> EngineRecord:
        """The same record, with the processes in it."""
        return replace(self, keeper=keeper, dockerd=dockerd)

    def write(self, path: Path) -> None:
        """Write it whole or not at all."""
        fresh = path.with_suffix(".new")
        with fresh.open("w", encoding="utf-8") as handle:
            json.dump(asdict(self), handle)
            handle.flush()
            os.fsync(handle.fileno())
        fresh.replace(path)

    @classmethod
    def read(cls, path: Path) -> EngineRecord | None:
        """The record of an engine that was not ended; ``None`` where there is none or it cannot be read."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            document = json.loads(path.read_text("utf-8"))
            for role in ("keeper", "dockerd"):
                document[role] = ProcessIdentity(**document[role]) if document[role] else None
            document["made_folders"] = tuple(document["made_folders"])
            return cls(**document)
        return None


def boot_id() -> str:
    """Names this boot of the machine; process identities of another one mean nothing."""
    try:
        return _BOOT_ID.read_text("ascii").strip()
    except OSError:
        return ""
