"""Kills a driver process at a chosen write to its state folder. Installed in the process itself, before it serves."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

VARIABLE = "SCRIPTED_DISK_TRAP"
PRELUDE = "from scripted import disk_trap; disk_trap.install(); "


class DiskTrap:
    """The test's end of a trap: a file that says at which write to kill."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def environment(self) -> dict[str, str]:
        """For the process."""
        return {VARIABLE: str(self._path), "PYTHONPATH": str(Path(__file__).parents[1])}

    def set(self, number: int, *, after: bool) -> None:
        """Kill at the n-th write from now, before or after it."""
        self._path.write_text(f"{number} {'after' if after else 'before'}")

    def clear(self) -> str:
        """Take the trap away; what it was sprung by, or nothing."""
        try:
            said = self._path.read_text()
        except FileNotFoundError:
            return ""
        self._path.unlink()
        return said.removeprefix("sprung ") if said.startswith("sprung ") else ""


def install() -> None:
    """Stand in the way of every write and removal."""
    from driver_docker import exit_journal, records

    path = Path(os.environ[VARIABLE])
    for owner, name in (
        (records, "replace_file"),
        (records.RecordStore, "remove"),
        (records.RecordStore, "remove_files"),
        (exit_journal.ExitJournal, "append"),
    ):
        setattr(owner, name, _guarded(path, getattr(owner, name), name))


def _guarded(path: Path, write: Callable[..., Any], name: str) -> Callable[..., Any]:
    def guarded(*args: Any, **kwargs: Any) -> Any:
        moment = _is_due(path)
        if moment == "before":
            _spring(path, f"before {name} {args}")
        result = write(*args, **kwargs)
        if moment == "after":
            _spring(path, f"after {name} {args}")
        return result

    return guarded


def _is_due(path: Path) -> str:
    try:
        number, moment = path.read_text().split()
    except (FileNotFoundError, ValueError):
        return ""
    left = int(number) - 1
    path.write_text(f"{left} {moment}")
    return moment if left == 0 else ""


def _spring(path: Path, what: str) -> None:
    path.write_text(f"sprung {what[:200]}")
    os.kill(os.getpid(), signal.SIGKILL)
