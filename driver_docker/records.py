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
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from driver_docker.atomic_file import replace_file
from driver_docker.errors import RecordError
from driver_docker.exit_journal import JOURNAL_FILE
from driver_docker.sandbox_ids import is_sandbox_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
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

_OWNER_FILE: Final = ".driver-owner"
_VERSION: Final = 1


class RecordPhase(StrEnum):
    """How far a sandbox has come, as the next driver must know it."""

    PROVISIONING = "provisioning"
    STARTING = "starting"
    """Its launch input is committed, and its containers are made to run from it; the next driver goes on with that."""
    ACTIVE = "active"
    """It was ready once in this run; a failure says that it is not any more."""
    STOPPING = "stopping"
    """A stop was asked for and is not complete; the next driver completes it."""
    STOPPED = "stopped"
    FAILED = "failed"
    """Its launch failed and everything of it was removed; kept until it is deleted."""
    DELETING = "deleting"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a sandbox is not ready and will not become so by itself."""

    reason: str
    message: str
    at: datetime
    verdict: Mapping[str, str] = field(default_factory=dict)
    """The verdict's metadata, where an exit was the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxRecord:
    """One sandbox. Holds no secret."""

    sandbox_id: str
    name: str
    workspace: str
    phase: RecordPhase
    changed_at: datetime
    """When phase or failure last changed; the transition time of its conditions."""
    generation: str = ""
    image_reference: str = ""
    image_id: str = ""
    runtime_image_id: str = ""
    """Image of the sandbox runtime that the workload container keeps; empty in records of older drivers."""
    runtime_image_reference: str = ""
    """How that image was named when the sandbox was created; its tag may be all that tells the revision."""
    isolation_backend: str = ""
    """Backend that the sandbox was admitted with; empty: the built-in one (isolation contract 2.5, the pin)."""
    container_name: str = ""
    workload_id: str = ""
    supervisor_id: str = ""
    was_ready: bool = False
    """Whether this generation reached ready: a later exit is an exit, not a failed start."""
    failure: Failure | None = None
    start_generation: str = ""
    """The gateway's name of the start that this run comes from; empty after a create, until a start adopts it."""
    fenced_finished_at: datetime | None = None
    """When the run before the last start ended: an end observed with this time is an old one (contract 5.9)."""

    def changed(self, at: datetime, **fields: Any) -> SandboxRecord:
        """A copy with other fields and a new time of change."""
        return replace(self, changed_at=at, **fields)


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
            # A mode given together with parents=True is for the last folder alone.
            self._directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._directory.mkdir(mode=0o700, exist_ok=True)
            details = self._directory.lstat()
            if details.st_uid != os.geteuid():
                raise RecordError(
                    f"state folder {self._directory} belongs to user {details.st_uid}, not to this driver"
                )
            self._directory.chmod(0o700)
            file = self._directory / _OWNER_FILE
            with contextlib.suppress(FileNotFoundError):
                if name := file.read_text(encoding="ascii").strip():
                    return name
            name = secrets.token_hex(16)
            replace_file(file, f"{name}\n".encode())
        except OSError as error:
            raise RecordError(f"state folder {self._directory} cannot be used: {error.strerror}") from error
        return name

    def driver_name(self) -> str | None:
        """The stable name of the driver instance that uses this folder; `None` when none ever did. Changes nothing.

        Raises:
            RecordError: The folder is there and cannot be read.
        """
        try:
            return (self._directory / _OWNER_FILE).read_text(encoding="ascii").strip() or None
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise RecordError(f"state folder {self._directory} cannot be read: {error}") from error

    def forget(self) -> None:
        """Remove the namespace's folder if no sandbox and no verdict is left in it; the next driver gets a new name."""
        if any(child.is_dir() or child.name == JOURNAL_FILE for child in self._directory.iterdir()):
            return
        shutil.rmtree(self._directory, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._directory.parent.rmdir()

    def load(self) -> tuple[SandboxRecord, ...]:
        """All records that can be read; a folder without one is a leftover of an interrupted create or delete."""
        found = []
        for folder in sorted(self._directory.iterdir()):
            if not folder.is_dir():
                continue
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                found.append(_decode(json.loads((folder / RECORD_FILE).read_bytes())))
        return tuple(found)

    def unreadable(self, known: frozenset[str]) -> tuple[str, ...]:
        """Ids of folders that hold no readable record; a folder that no sandbox can have is none of this driver's."""
        return tuple(
            folder.name
            for folder in sorted(self._directory.iterdir())
            if folder.is_dir() and folder.name not in known and is_sandbox_id(folder.name)
        )

    def save(self, record: SandboxRecord) -> None:
        """Write one record, durably.

        Raises:
            RecordError: The disk refused.
        """
        body = {"version": _VERSION, **asdict(record)}
        data = json.dumps(body, default=_encode, indent=1).encode()
        self._put(record.sandbox_id, {RECORD_FILE: data}, durable=True)

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
        """One launch file, or `None` when it was not written."""
        try:
            return (self._folder(sandbox_id) / name).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise RecordError(f"{name} of sandbox {sandbox_id} cannot be read: {error.strerror}") from error

    def add_exit(self, sandbox_id: str, *, verdict: Mapping[str, str], message: str, tail: str, at: datetime) -> None:
        """Append one verdict with its raw tail; the oldest beyond the limit is dropped.

        Raises:
            RecordError: The disk refused.
        """
        exits = [
            *self.exits(sandbox_id),
            {"at": at.isoformat(), "message": message, "verdict": dict(verdict), "tail": tail},
        ]
        self._put(sandbox_id, {EXITS_FILE: json.dumps(exits[-MAX_EXITS:], indent=1).encode()}, durable=True)

    def exits(self, sandbox_id: str) -> list[dict[str, Any]]:
        """The verdicts of a sandbox, oldest first."""
        try:
            found = json.loads((self._folder(sandbox_id) / EXITS_FILE).read_bytes())
        except (OSError, ValueError):
            return []
        return found if isinstance(found, list) else []

    def remove(self, sandbox_id: str) -> bool:
        """Remove a sandbox's folder; whether there was one.

        Raises:
            RecordError: The disk refused.
        """
        folder = self._folder(sandbox_id)
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:
            return False
        except OSError as error:
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


def _encode(value: object) -> str:
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    raise TypeError(type(value).__name__)


def _decode(body: dict[str, Any]) -> SandboxRecord:
    if body.pop("version") != _VERSION:
        raise ValueError("version")
    failure = body.pop("failure")
    if failure is not None:
        failure = Failure(**{**failure, "at": datetime.fromisoformat(failure["at"])})
    fence = body.pop("fenced_finished_at", None)
    return SandboxRecord(
        **{
            **body,
            "fenced_finished_at": datetime.fromisoformat(fence) if fence is not None else None,
            "phase": RecordPhase(body["phase"]),
            "changed_at": datetime.fromisoformat(body["changed_at"]),
            "failure": failure,
        }
    )
