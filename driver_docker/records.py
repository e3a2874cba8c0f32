"""What must outlive the driver: one owner-only folder a sandbox, each file written atomically.

The folder and its file names are those of compute-driver contract 5.1, beside `record.json` (what this driver knows of
the sandbox) and `exits.json` (its last verdicts with their tails).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from driver_docker.atomic_file import is_scratch, replace_file
from driver_docker.errors import RecordError
from driver_docker.exit_journal import JOURNAL_FILE
from driver_docker.regular_file import read_regular
from driver_docker.sandbox_ids import is_sandbox_id
from driver_docker.sandbox_record import SandboxRecord, decode, encode

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import datetime
    from pathlib import Path

RECORD_FILE: Final = "record.json"
EXITS_FILE: Final = "exits.json"
BOOTSTRAP_FILE: Final = "boundary-bootstrap.json"
CERTIFICATE_FILE: Final = "boundary-server.crt"
KEY_FILE: Final = "boundary-server.key"
DESCRIPTOR_FILE: Final = "runtime-descriptor.json"
AUTH_FILE: Final = "supervisor-auth.json"
MAIN_PROCESS_FILE: Final = "main-process.json"
WORKSPACE_ROOT_FILE: Final = "workspace-root"
RETAINED_FILE: Final = "retained-launch.json"
LAUNCH_FILES: Final = (
    AUTH_FILE,
    BOOTSTRAP_FILE,
    CERTIFICATE_FILE,
    KEY_FILE,
    DESCRIPTOR_FILE,
    MAIN_PROCESS_FILE,
    WORKSPACE_ROOT_FILE,
    RETAINED_FILE,
)
"""Everything that a start needs; the secrets first, so that they go first."""
MAX_EXITS: Final = 20
"""How many verdicts are kept for each sandbox."""

_MADE_FILE: Final = ".made-state-dir"
"""Says that a driver made the folder around the namespace's, and may remove it."""
_OTHERS_WRITE: Final = 0o022
_OWNER_FILE: Final = ".driver-owner"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadableRecord:
    """A record that is there and cannot be read now: nothing is known of its sandbox, except that there is one."""

    sandbox_id: str
    why: str
    """Names the file and says what is wrong with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRecords:
    """Everything that a namespace's folder says of its sandboxes."""

    records: tuple[SandboxRecord, ...]
    unreadable: tuple[UnreadableRecord, ...]
    without: tuple[str, ...]
    """Ids of folders without a record, which an interrupted create or delete left."""

    @property
    def known(self) -> frozenset[str]:
        """Ids of every sandbox that there is, readable or not."""
        return frozenset(each.sandbox_id for each in self.records) | {each.sandbox_id for each in self.unreadable}


class RecordStore:
    """The records of one namespace. Methods block; the caller runs them on a thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @property
    def directory(self) -> Path:
        """The namespace's folder."""
        return self._directory

    def open(self) -> str:
        """Make the folder and return the stable name of this driver instance.

        Raises:
            RecordError: The folder cannot be made, or is not the caller's own.
        """
        try:
            was_there = self._directory.parent.exists()
            # A mode given together with parents=True is for the last folder alone.
            self._directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._refuse_writable()
            self._directory.mkdir(mode=0o700, exist_ok=True)
            if not was_there:
                (self._directory / _MADE_FILE).touch(mode=0o600)
            details = self._directory.lstat()
            if details.st_uid != os.geteuid():
                raise RecordError(
                    f"state folder {self._directory} belongs to user {details.st_uid}, not to this driver"
                )
            self._directory.chmod(0o700)
            if name := self.driver_name():
                return name
            if any(is_sandbox_id(entry.name) for entry in self._folders()):
                raise RecordError(
                    f"state folder {self._directory} holds sandboxes, but no {_OWNER_FILE} that says whose containers "
                    "are theirs; restore it, with the value of the containers' label openshell.ai/driver-owner"
                )
            name = secrets.token_hex(16)
            replace_file(self._directory / _OWNER_FILE, f"{name}\n".encode())
        except OSError as error:
            raise RecordError(f"state folder {self._directory} cannot be used: {error.strerror}") from error
        return name

    def _refuse_writable(self) -> None:
        """Refuse a folder in which others could replace this namespace's, unless it keeps them from that."""
        details = self._directory.parent.stat()
        if details.st_mode & _OTHERS_WRITE and not details.st_mode & stat.S_ISVTX:
            raise RecordError(
                f"state folder {self._directory.parent} can be changed by other users (mode "
                f"{stat.S_IMODE(details.st_mode):04o}); run chmod 700 on it, or name another with --state-dir"
            )

    def driver_name(self) -> str | None:
        """The stable name of the driver instance that uses this folder; `None` when none ever did. Changes nothing.

        Raises:
            RecordError: It is there and cannot be read; a new name would disown every container.
        """
        file = self._directory / _OWNER_FILE
        try:
            name = read_regular(file).decode("ascii").strip()
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise RecordError(f"{file} cannot be read: {why}") from error
        if not name:
            raise RecordError(
                f"{file} is empty; restore it, with the value of the containers' label openshell.ai/driver-owner"
            )
        return name

    def forget(self) -> None:
        """Remove the namespace's folder if no sandbox and no verdict is left in it; the next driver gets a new name.

        The folder around it goes too where a driver made it and nothing else is in it; an operator's own stays.
        """
        try:
            if self._folders() or os.path.lexists(self._directory / JOURNAL_FILE):
                return
        except RecordError:
            return  # what cannot be looked at is not known to be empty
        is_made = os.path.lexists(self._directory / _MADE_FILE)
        shutil.rmtree(self._directory, ignore_errors=True)
        if is_made:
            with contextlib.suppress(OSError):
                self._directory.parent.rmdir()

    def load(self) -> StoredRecords:
        """Every sandbox that the folder knows of. A folder that no sandbox can have is none of this driver's.

        Raises:
            RecordError: The folder itself cannot be read.
        """
        records, unreadable, without = [], [], []
        for sandbox_id in sorted(entry.name for entry in self._folders() if is_sandbox_id(entry.name)):
            file = self._directory / sandbox_id / RECORD_FILE
            try:
                records.append(decode(read_regular(file), sandbox_id))
            except FileNotFoundError:
                without.append(sandbox_id)
            except (OSError, ValueError) as error:
                why = error.strerror if isinstance(error, OSError) else str(error)
                unreadable.append(UnreadableRecord(sandbox_id=sandbox_id, why=f"record {file} cannot be read: {why}"))
        return StoredRecords(records=tuple(records), unreadable=tuple(unreadable), without=tuple(without))

    def sweep(self) -> None:
        """Remove what writes left that were cut by the end of their process: secrets may be in it.

        Only for a driver that is coming up: it writes nothing yet, and nobody else may.

        Raises:
            RecordError: The folder itself cannot be read, or the disk refused something; everything else is removed
                all the same.
        """
        refused: list[str] = []
        for folder in (self._directory, *(self._directory / entry.name for entry in self._folders())):
            try:
                scratch = [file for file in folder.iterdir() if is_scratch(file.name)]
            except OSError as error:
                refused.append(f"{folder}: {error.strerror}")
                continue
            for file in scratch:
                try:
                    file.unlink(missing_ok=True)
                except OSError as error:
                    refused.append(f"{file}: {error.strerror}")
        if refused:
            raise RecordError(f"not all of state folder {self._directory} can be cleared: {'; '.join(refused)}")

    def _folders(self) -> list[os.DirEntry[str]]:
        """The folders in the namespace's own; none where that does not exist.

        Raises:
            RecordError: It cannot be read.
        """
        try:
            with os.scandir(self._directory) as entries:
                return [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise RecordError(f"state folder {self._directory} cannot be read: {error.strerror}") from error

    def save(self, record: SandboxRecord) -> None:
        """Write one record, durably.

        Raises:
            RecordError: The disk refused.
        """
        self._put(record.sandbox_id, {RECORD_FILE: encode(record)}, durable=True)

    def save_files(self, sandbox_id: str, files: Mapping[str, bytes]) -> None:
        """Write launch files of a sandbox; secrets among them are readable for this user alone.

        Raises:
            RecordError: The disk refused.
        """
        self._put(sandbox_id, files, durable=False)

    def commit_files(self, sandbox_id: str, files: Mapping[str, bytes], *, last: str) -> None:
        """Replace a set of files that count together: `last` goes first and comes back last.

        Raises:
            RecordError: The disk refused; `last` is missing then, which says that the set does not count.
        """
        self.remove_files(sandbox_id, (last,))
        self._put(sandbox_id, {name: data for name, data in files.items() if name != last}, durable=False)
        self._put(sandbox_id, {last: files[last]}, durable=True)

    def remove_files(self, sandbox_id: str, names: Iterable[str]) -> None:
        """Remove files of a sandbox where they are.

        Raises:
            RecordError: The disk refused.
        """
        for name in names:
            try:
                (self._folder(sandbox_id) / name).unlink(missing_ok=True)
            except OSError as error:
                raise RecordError(f"{name} of sandbox {sandbox_id} cannot be removed: {error.strerror}") from error

    def read_file(self, sandbox_id: str, name: str) -> bytes | None:
        """One file of a sandbox, or `None` when it was not written.

        Raises:
            RecordError: It is there and cannot be read.
        """
        try:
            return read_regular(self._folder(sandbox_id) / name)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise RecordError(f"{name} of sandbox {sandbox_id} cannot be read: {error.strerror}") from error

    def add_exit(self, sandbox_id: str, *, verdict: Mapping[str, str], message: str, tail: str, at: datetime) -> None:
        """Append one verdict with its raw tail; the oldest beyond the limit is dropped.

        Raises:
            RecordError: The disk refused; the former ones are as they were.
        """
        exits = [
            *self.exits(sandbox_id),
            {"at": at.isoformat(), "message": message, "verdict": dict(verdict), "tail": tail},
        ]
        self._put(sandbox_id, {EXITS_FILE: json.dumps(exits[-MAX_EXITS:], indent=1).encode()}, durable=True)

    def exits(self, sandbox_id: str) -> list[dict[str, Any]]:
        """The verdicts of a sandbox, oldest first; none of a file that is damaged.

        Raises:
            RecordError: They are there and cannot be read now.
        """
        data = self.read_file(sandbox_id, EXITS_FILE)
        try:
            found = json.loads(data) if data is not None else []
        except (ValueError, RecursionError):
            return []
        return found if isinstance(found, list) else []

    def remove(self, sandbox_id: str) -> bool:
        """Remove a sandbox's folder; whether there was one.

        Raises:
            RecordError: The disk refused.
        """
        folder = self._folder(sandbox_id)
        try:
            folder.lstat()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise RecordError(f"state folder of sandbox {sandbox_id} cannot be read: {error.strerror}") from error
        try:
            shutil.rmtree(folder)
        except OSError as error:  # also where a file in it is gone: the rest of it may still be there
            raise RecordError(f"state folder of sandbox {sandbox_id} cannot be removed: {error.strerror}") from error
        return True

    def _folder(self, sandbox_id: str) -> Path:
        """The one way from an id to a folder: an id with a path in it would lead out of this namespace.

        Raises:
            RecordError: No sandbox can have this id.
        """
        if not is_sandbox_id(sandbox_id):
            raise RecordError(f"no sandbox can have the id {sandbox_id[:200]!r}, so it has no state folder")
        return self._directory / sandbox_id

    def _put(self, sandbox_id: str, files: Mapping[str, bytes], *, durable: bool) -> None:
        folder = self._folder(sandbox_id)
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            for name, data in files.items():
                replace_file(folder / name, data, durable=durable)
        except OSError as error:
            raise RecordError(f"state of sandbox {sandbox_id} cannot be written: {error.strerror}") from error
