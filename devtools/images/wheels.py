"""What of the locked wheels goes into an image."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from devtools.images.errors import BuildInputError

if TYPE_CHECKING:
    from collections.abc import Iterable

SHIPPED_DISTRIBUTIONS = ("cffi", "cryptography", "grpcio", "protobuf", "pyjwt", "structlog", "typing-extensions")
"""The distributions that runtime and supervisor may import."""

_DROPPED_SUFFIXES = frozenset({
    ".c", ".cfg", ".cpp", ".h", ".json", ".pem", ".pth", ".pxd", ".pxi", ".pyc", ".pyi", ".pyx", ".typed",
})  # fmt: skip
_DROPPED_FOLDERS = frozenset({"__pycache__", "bin", "scripts", "test", "testing", "tests"})
_KEPT_METADATA = frozenset({"METADATA"})
_LOCKED = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;\\]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelFile:
    """A file of an installed wheel.

    Attributes:
        source: Where it lies on this machine.
        relative: Where it lies in ``site-packages``.
    """

    source: Path
    relative: PurePosixPath


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedRequirement:
    """One requirement of a lock file.

    Attributes:
        name: The distribution, normalised.
        version: Its exact version.
        hashes: The digests of its files, sorted.
    """

    name: str
    version: str
    hashes: tuple[str, ...]


def normalised(name: str) -> str:
    """Bring a distribution's name to the one form that is compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(text: str) -> dict[str, LockedRequirement]:
    """Read a lock file in pip's requirements form."""
    found: dict[str, tuple[str, list[str]]] = {}
    current: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        if match := _LOCKED.match(stripped):
            current = []
            found[normalised(match[1])] = (match[2], current)
        current.extend(re.findall(r"--hash=(\S+)", stripped) if not stripped.startswith("#") else ())
    return {
        name: LockedRequirement(name=name, version=version, hashes=tuple(sorted(hashes)))
        for name, (version, hashes) in found.items()
    }


def shipped_requirements(lock: dict[str, LockedRequirement], site_packages: Path) -> list[LockedRequirement]:
    """Find the shipped distributions in the lock and compare with what is installed.

    Raises:
        BuildInputError: when one is not locked, not installed, or installed in another version.
    """
    shipped: list[LockedRequirement] = []
    for name in SHIPPED_DISTRIBUTIONS:
        locked = lock.get(name)
        if locked is None:
            raise BuildInputError(f"{name} goes into the images, but the lock file does not name it")
        installed = _distribution(name, site_packages)
        if installed.version != locked.version:
            raise BuildInputError(
                f"{name} {installed.version} is installed, but {locked.version} is locked; run ./dev to renew .venv"
            )
        shipped.append(locked)
    return shipped


def _distribution(name: str, site_packages: Path) -> metadata.Distribution:
    for distribution in metadata.distributions(name=name, path=[str(site_packages)]):
        return distribution
    raise BuildInputError(f"{name} goes into the images, but is not installed in {site_packages}; run ./dev again")


def _is_shipped(relative: PurePosixPath) -> bool:
    folders = relative.parts[:-1]
    if ".." in folders or relative.suffix in _DROPPED_SUFFIXES:
        return False
    if folders and folders[0].endswith(".dist-info"):
        return relative.name in _KEPT_METADATA or "licenses" in folders or relative.name.startswith("LICENSE")
    return not _DROPPED_FOLDERS.intersection(folders)


def wheel_files(site_packages: Path, names: Iterable[str] = SHIPPED_DISTRIBUTIONS) -> list[WheelFile]:
    """List the files of installed distributions that are needed to run them.

    Raises:
        BuildInputError: when one is not installed.
    """
    files: list[WheelFile] = []
    for name in names:
        for file in _distribution(name, site_packages).files or ():
            relative = PurePosixPath(file.as_posix())
            source = site_packages / relative
            if _is_shipped(relative) and source.is_file():
                files.append(WheelFile(source=source, relative=relative))
    return sorted(files, key=lambda file: file.relative)
