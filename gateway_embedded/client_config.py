"""Registers this gateway in the clients' on-disk configuration, and leaves it at exit as it was (public-api 1.1).

What was there before is noted in the gateway's state folder first, so that a gateway that was killed is undone by the
next one. Only what was written is undone, and only while it is still what was written: keys, tokens and choices in the
same place are the user's. A running gateway locks its entry's folder, so that two never take it from each other.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

import structlog
from pydantic import TypeAdapter, ValidationError

from gateway_embedded.errors import ConfigurationError
from openshell.isolation.errors import cause_of

_log = structlog.get_logger("gateway.client-config")


def default_root() -> Path:
    """``$XDG_CONFIG_HOME/openshell``, else ``~/.config/openshell``."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "openshell"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Note:
    """What a registration found and what it wrote."""

    root: str
    name: str
    wrote: str
    """Content of the entry's ``metadata.json``."""
    metadata: str | None
    active: str | None
    active_led_to_an_entry: bool
    """Whether `active` named an entry of this root."""
    had_last_sandbox: bool
    made: tuple[str, ...]
    """Folders that did not exist, outermost first."""


class ClientRegistration:
    """One gateway's entry in the clients' configuration.

    Args:
        root: The clients' configuration.
        name: The entry.
        note: File in the gateway's state folder that says how to undo the registration.
    """

    def __init__(self, *, root: Path, name: str, note: Path) -> None:
        self.root = root
        self.name = name
        self.note = note
        self._lock: int | None = None

    @property
    def folder(self) -> Path:
        """The entry's folder."""
        return self.root / "gateways" / self.name

    @property
    def active_file(self) -> Path:
        """The file that names the gateway that clients use when none is named."""
        return self.root / "active_gateway"

    @property
    def metadata_file(self) -> Path:
        """The file that tells clients where the gateway is."""
        return self.folder / "metadata.json"

    def register(self, *, endpoint: str, port: int) -> None:
        """Write the entry and make it the active one.

        Raises:
            ConfigurationError: A running gateway is registered under that name, or the files cannot be written.
        """
        try:
            self._register(endpoint=endpoint, port=port)
        except OSError as error:
            self.release()
            raise ConfigurationError(
                f"the clients' configuration in {self.root} cannot be written: {cause_of(error)}; "
                "name another --client-config, or none"
            ) from error

    def _register(self, *, endpoint: str, port: int) -> None:
        self.undo_after_crash()
        made = tuple(str(path) for path in (self.root, self.root / "gateways", self.folder) if not path.exists())
        self._claim()
        metadata = {
            "name": self.name,
            "gateway_endpoint": endpoint,
            "is_remote": False,
            "gateway_port": port,
            "auth_mode": "plaintext",
        }
        active = _read(self.active_file)
        note = _Note(
            root=str(self.root),
            name=self.name,
            wrote=json.dumps(metadata, indent=2) + "\n",
            metadata=_read(self.metadata_file),
            active=active,
            active_led_to_an_entry=active is not None and self._is_entry(active),
            had_last_sandbox=(self.folder / "last_sandbox").exists(),
            made=made,
        )
        _write(self.note, json.dumps(asdict(note)))
        _write(self.metadata_file, note.wrote)
        _write(self.active_file, self.name + "\n")

    def undo_after_crash(self) -> None:
        """Undo what an earlier process registered and could not undo.

        Raises:
            ConfigurationError: A running gateway has taken that entry over, under the same name.
        """
        before = self._noted()
        if before is None:
            return
        entry = ClientRegistration(root=Path(before.root), name=before.name, note=self.note)
        was_there = entry.folder.exists()
        try:
            entry._claim()
        except ConfigurationError:
            if entry.folder == self.folder:
                raise
            return
        try:
            entry._restore(before)
            if not was_there:
                _remove_empty(entry.folder)
        finally:
            entry.release()

    def undo(self) -> None:
        """Leave the configuration as it was; what a user changed meanwhile stays."""
        try:
            before = self._noted()
            if before is not None:
                self._restore(before)
        except OSError as error:
            _log.warning(
                "the clients' configuration could not be restored; the next start tries again", error=str(error)
            )
        finally:
            self.release()

    def release(self) -> None:
        """Let go of the entry as it is, as the end of the process would."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _claim(self) -> None:
        while self._lock is None:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                current = self.folder.exists() and os.path.samestat(os.fstat(descriptor), self.folder.stat())
            except BlockingIOError:
                os.close(descriptor)
                raise ConfigurationError(
                    f"a running gateway is registered as {self.name!r} in {self.root}; choose another --name, "
                    "or --client-config none",
                    reason="GATEWAY_NAME_IN_USE",
                ) from None
            except OSError as error:
                _log.warning("the clients' configuration cannot be locked", error=str(error))
                current = True
            if current:
                self._lock = descriptor
            else:  # another gateway that ended removed the folder between the two steps
                os.close(descriptor)

    def _noted(self) -> _Note | None:
        text = _read(self.note)
        if text is None:
            return None
        try:
            return TypeAdapter(_Note).validate_json(text)
        except ValidationError:
            _log.warning("the note about the clients' configuration cannot be read; leaving it as it is")
            self.note.unlink(missing_ok=True)
            return None

    def _restore(self, before: _Note) -> None:
        found = _read(self.metadata_file)
        if found in (before.wrote, None):
            self._undo_entry(before, found)
            self._undo_choice(before)
            _remove_empty(*(Path(folder) for folder in reversed(before.made)))
        self.note.unlink(missing_ok=True)

    def _undo_entry(self, before: _Note, found: str | None) -> None:
        if found is None:
            return
        if before.metadata is not None:
            _write(self.metadata_file, before.metadata)
            return
        self.metadata_file.unlink(missing_ok=True)
        if not before.had_last_sandbox:
            (self.folder / "last_sandbox").unlink(missing_ok=True)

    def _undo_choice(self, before: _Note) -> None:
        if (_read(self.active_file) or "").strip() != self.name:
            return
        if before.active is None or (before.active_led_to_an_entry and not self._is_entry(before.active)):
            # Nobody had chosen, or the chosen gateway has ended meanwhile and taken its entry along.
            self.active_file.unlink(missing_ok=True)
        else:
            _write(self.active_file, before.active)

    def _is_entry(self, name: str) -> bool:
        return (self.root / "gateways" / name.strip() / "metadata.json").exists()


def _remove_empty(*folders: Path) -> None:
    """Remove folders, innermost first, up to the first that holds something."""
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def _write(path: Path, text: str) -> None:
    """Write a file that is complete or as before, readable by its owner alone."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        part.rename(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
