"""Registers this gateway in the clients' on-disk configuration, and leaves it at exit as it was (public-api 1.1).

What was there before is noted in the gateway's state folder first, so that a gateway that was killed is undone by the
next one.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path

import structlog

_log = structlog.get_logger("gateway.client-config")


def default_root() -> Path:
    """``$XDG_CONFIG_HOME/openshell``, else ``~/.config/openshell``."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "openshell"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRegistration:
    """One gateway's entry in the clients' configuration."""

    root: Path
    name: str
    note: Path
    """File in the gateway's state folder that says how to undo the registration."""

    @property
    def folder(self) -> Path:
        """The entry's folder."""
        return self.root / "gateways" / self.name

    @property
    def active_file(self) -> Path:
        """The file that names the gateway that clients use when none is named."""
        return self.root / "active_gateway"

    def register(self, *, endpoint: str, port: int) -> None:
        """Write the entry and make it the active one."""
        self.undo_after_crash()
        before = {
            "root": str(self.root),
            "name": self.name,
            "active": _read(self.active_file),
            "metadata": _read(self.folder / "metadata.json"),
        }
        _write(self.note, json.dumps(before))
        metadata = {
            "name": self.name,
            "gateway_endpoint": endpoint,
            "is_remote": False,
            "gateway_port": port,
            "auth_mode": "plaintext",
        }
        _write(self.folder / "metadata.json", json.dumps(metadata, indent=2) + "\n")
        _write(self.active_file, self.name + "\n")

    def undo_after_crash(self) -> None:
        """Undo what an earlier process registered and could not undo."""
        text = _read(self.note)
        if text is None:
            return
        try:
            before = json.loads(text)
            entry = ClientRegistration(root=Path(before["root"]), name=before["name"], note=self.note)
            active, metadata = before["active"], before["metadata"]
        except (ValueError, KeyError, TypeError):
            _log.warning("the note about the clients' configuration cannot be read; leaving it as it is")
            self.note.unlink(missing_ok=True)
            return
        entry._restore(active, metadata)

    def undo(self) -> None:
        """Leave the configuration as it was; what a user changed meanwhile stays."""
        self.undo_after_crash()

    def _restore(self, active: str | None, metadata: str | None) -> None:
        if (_read(self.active_file) or "").strip() == self.name:
            if active is None:
                self.active_file.unlink(missing_ok=True)
            else:
                _write(self.active_file, active)
        if metadata is not None:
            _write(self.folder / "metadata.json", metadata)
        else:
            shutil.rmtree(self.folder, ignore_errors=True)
            for folder in (self.root / "gateways", self.root):
                try:
                    folder.rmdir()
                except OSError:
                    break
        self.note.unlink(missing_ok=True)


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
