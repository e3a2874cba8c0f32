"""The last verdicts of a namespace with their raw tails, kept across restarts and deletes.

One owner-only file beside the records, one JSON object a line, newest last. It is appended to, so that a verdict costs
one small write, and shortened when it has grown to twice its bounds. A line that a crash cut is skipped by readers.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from driver_docker.atomic_file import replace_file
from driver_docker.errors import RecordError
from driver_docker.regular_file import read_regular

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

JOURNAL_FILE: Final = "exits.jsonl"
MAX_ENTRIES: Final = 200
"""How many verdicts of a namespace are kept; up to twice as many lie in the file between two cuts."""
MAX_BYTES: Final = 4 * 1024 * 1024
"""Most bytes that a cut leaves."""
_TURN: Final = threading.Lock()
"""Held while a thread appends: a line that is written while the file is being cut would be lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEntry:
    """One verdict."""

    at: datetime
    """When it was recorded, in UTC."""
    sandbox_id: str
    name: str
    workspace: str
    message: str
    verdict: Mapping[str, str]
    """The verdict's metadata (`openshell.verdict.*`)."""
    tail: str = field(default="", repr=False)
    """The raw end of the container's log; for the operator alone."""

    def is_of(self, sandbox: str) -> bool:
        """Whether it is of a sandbox: its id or the beginning of it, its name, or workspace/name."""
        named = sandbox in {self.name, f"{self.workspace}/{self.name}"}
        return named or self.sandbox_id.startswith(sandbox)

    def to_json(self) -> dict[str, Any]:
        """As it is written, and as `exits -o json` prints it."""
        return {
            "at": self.at.astimezone(UTC).isoformat(),
            "sandbox_id": self.sandbox_id,
            "name": self.name,
            "workspace": self.workspace,
            "message": self.message,
            "verdict": dict(self.verdict),
            "tail": self.tail,
        }


class ExitJournal:
    """The journal in one namespace's folder. Methods block; one process at a time appends."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / JOURNAL_FILE

    def append(self, entry: JournalEntry) -> None:
        """Add a verdict, durably.

        Raises:
            RecordError: The disk refused.
        """
        line = json.dumps(entry.to_json()).encode() + b"\n"
        with _TURN:
            self._append(line)

    def _append(self, line: bytes) -> None:
        try:
            descriptor = os.open(self._file, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                size = os.fstat(descriptor).st_size
                if size and os.pread(descriptor, 1, size - 1) != b"\n":
                    line = b"\n" + line  # after a line that a crash cut
                os.write(descriptor, line)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            self._shorten()
        except OSError as error:
            raise RecordError(f"journal {self._file} cannot be written: {error.strerror}") from error

    def read(self, *, of: str = "", limit: int = MAX_ENTRIES) -> tuple[JournalEntry, ...]:
        """The last verdicts, oldest first.

        Args:
            of: Only those of one sandbox: its id or the beginning of it, its name, or workspace/name.
            limit: How many at most.

        Raises:
            RecordError: The file is there and cannot be read.
        """
        try:
            lines = read_regular(self._file).splitlines()
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise RecordError(f"journal {self._file} cannot be read: {error.strerror}") from error
        found = [entry for entry in map(_decode, lines) if entry is not None]
        if of:
            found = [entry for entry in found if entry.is_of(of)]
        return tuple(found[-limit:])

    def _shorten(self) -> None:
        data = read_regular(self._file)
        lines = data.splitlines(keepends=True)
        if len(data) <= 2 * MAX_BYTES and len(lines) <= 2 * MAX_ENTRIES:
            return
        kept: list[bytes] = []
        size = 0
        for line in reversed(lines[-MAX_ENTRIES:]):
            size += len(line)
            if kept and size > MAX_BYTES:
                break
            kept.append(line)
        replace_file(self._file, b"".join(reversed(kept)))


def _decode(line: bytes) -> JournalEntry | None:
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        body = json.loads(line)
        return JournalEntry(
            at=datetime.fromisoformat(body["at"]),
            sandbox_id=str(body["sandbox_id"]),
            name=str(body["name"]),
            workspace=str(body["workspace"]),
            message=str(body["message"]),
            verdict={str(key): str(value) for key, value in dict(body["verdict"]).items()},
            tail=str(body["tail"]),
        )
    return None
