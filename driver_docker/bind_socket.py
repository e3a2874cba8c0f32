"""The socket that the driver serves on: owner-only, never stolen, removed only by whoever made it.

grpcio cannot look at a peer's credentials, so folder 0700 and socket 0600 are what keeps other users out
(compute-driver contract 7.2).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
from typing import TYPE_CHECKING, Final, Self

from driver_docker.errors import ConfigurationError
from openshell.isolation.endpoints import MAX_SOCKET_PATH_BYTES

if TYPE_CHECKING:
    from pathlib import Path

NAMESPACE_LOCK: Final = ".lock"
"""File in a namespace's state folder that the driver of that namespace holds locked."""

_OTHERS: Final = 0o077
_PROBE_SECONDS: Final = 2.0


class FileLock:
    """An exclusive lock on a file, held until `release` or the end of the process, whichever comes first."""

    def __init__(self, file: Path, *, held_by: str) -> None:
        self._file = file
        descriptor = _locked(file, held_by)
        while not _is_at(descriptor, file):
            # Who held it removed it between our opening and our lock: a third would lock a file that we do not see.
            os.close(descriptor)
            descriptor = _locked(file, held_by)
        self._descriptor = descriptor

    def release(self, *, remove: bool = True) -> None:
        """Give the lock up, and remove its file while it is still held."""
        if remove:
            with contextlib.suppress(OSError):
                self._file.unlink()
        os.close(self._descriptor)


def _locked(file: Path, held_by: str) -> int:
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigurationError(f"lock file {file} cannot be opened: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise ConfigurationError(held_by) from error
    return descriptor


def _is_at(descriptor: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), file.lstat())
    except FileNotFoundError:
        return False


class BindSocket:
    """The reserved place of a socket.

    Raises:
        ConfigurationError: The path is too long, its folder is not the driver's own, or somebody serves there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        check_path(path)
        _own_folder(path.parent)
        self._lock = FileLock(
            path.with_name(f"{path.name}.lock"),
            held_by=f"another driver is serving on {path}; stop it first or choose another --bind-socket",
        )
        try:
            _remove_stale(path)
        except BaseException:
            self._lock.release()
            raise

    @property
    def address(self) -> str:
        """The socket as grpc names it."""
        return f"unix:{self.path}"

    def restrict(self) -> None:
        """Make the bound socket accessible to its owner alone."""
        self.path.chmod(0o600)

    def close(self) -> None:
        """Remove the socket and give up the lock. Call once."""
        with contextlib.suppress(OSError):
            self.path.unlink()
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def check_path(path: Path) -> None:
    """Refuse a path that no Unix socket can have.

    Raises:
        ConfigurationError: It is not absolute, or too long in bytes.
    """
    if not path.is_absolute():
        raise ConfigurationError(f"--bind-socket {path} must be absolute")
    length = len(os.fsencode(path))
    if length > MAX_SOCKET_PATH_BYTES:
        raise ConfigurationError(
            f"--bind-socket is {length} bytes long, but a Unix socket's path has at most {MAX_SOCKET_PATH_BYTES}: "
            f"{path}"
        )


def _own_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        details = folder.lstat()
    except OSError as error:
        raise ConfigurationError(f"the socket's folder {folder} cannot be made: {error.strerror}") from error
    if not stat.S_ISDIR(details.st_mode):
        raise ConfigurationError(f"the socket's folder {folder} is no folder or a link; name a folder of your own")
    if details.st_uid != os.geteuid():
        raise ConfigurationError(f"the socket's folder {folder} belongs to user {details.st_uid}, not to this driver")
    if details.st_mode & _OTHERS:
        mode = stat.S_IMODE(details.st_mode)
        raise ConfigurationError(
            f"the socket's folder {folder} is open to other users (mode {mode:04o}); run chmod 700 on it"
        )


def _remove_stale(path: Path) -> None:
    try:
        details = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(details.st_mode) or details.st_uid != os.geteuid():
        raise ConfigurationError(f"{path} exists and is not a socket of this user; remove it first")
    if listens(path):
        raise ConfigurationError(
            f"another process is listening on {path}; stop it first or choose another --bind-socket"
        )
    path.unlink(missing_ok=True)


def listens(path: Path) -> bool:
    """Whether somebody listens on a Unix socket; `False` only where nobody does, for certain. Blocks for a moment.

    Raises:
        ConfigurationError: It cannot be told.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_SECONDS)
        try:
            probe.connect(os.fsencode(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError as error:
            # For example a listener that is too busy to take one more: it is there.
            words = error.strerror or "no answer"
            raise ConfigurationError(
                f"whether another process is listening on {path} cannot be told ({words}); choose another --bind-socket"
            ) from error
    return True
