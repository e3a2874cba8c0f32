"""The gateway's state folder: its owner's alone, and used by one gateway at a time."""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

from gateway_embedded.errors import ConfigurationError
from openshell.isolation.errors import cause_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDir:
    """A locked state folder."""

    path: Path
    lock_descriptor: int

    @classmethod
    def claim(cls, path: Path) -> StateDir:
        """Create or check the folder and lock it.

        Raises:
            ConfigurationError: It is not ours alone, not a folder, or another gateway uses it.
        """
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if path.is_symlink():
                raise ConfigurationError(
                    f"the state folder {path} is a symbolic link; name the folder itself with --state-dir"
                )
            found = path.stat()
            if found.st_uid != os.geteuid():
                raise ConfigurationError(
                    f"the state folder {path} belongs to user {found.st_uid}, not to {os.geteuid()}; "
                    "name another with --state-dir"
                )
            if found.st_mode & 0o077:
                raise ConfigurationError(
                    f"the state folder {path} is open to others; set its mode with: chmod 700 {path}"
                )
            descriptor = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigurationError(
                f"the state folder {path} cannot be used: {cause_of(error)}; name another with --state-dir"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            raise ConfigurationError(
                f"another gateway uses the state folder {path}; stop it or name another with --state-dir",
                reason="STATE_DIR_IN_USE",
            ) from error
        # The database is created here so that it is its owner's alone from its first byte on.
        os.close(os.open(path / "gateway.sqlite3", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        return cls(path=path, lock_descriptor=descriptor)

    def release(self) -> None:
        """Let another gateway use the folder."""
        os.close(self.lock_descriptor)
