"""The lock file: whether it satisfies the project's requirements, and making it anew."""

from __future__ import annotations

import re
import subprocess
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from devtools.errors import StepFailedError

if TYPE_CHECKING:
    from pathlib import Path

LOCK_NAME = "requirements.lock"
_UV_OPTIONS = (
    "--all-extras",
    "--universal",
    "--python-version=3.11",
    "--generate-hashes",
    "--no-annotate",
    "--no-header",
    "--no-emit-index-url",
    "--no-emit-find-links",
    "--no-config",
    "--quiet",
)
_ENTRY = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;\\]+)")
_HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}\b")
_ADDRESS = re.compile(r"://|^\s*--(index-url|extra-index-url|find-links|trusted-host)|^\s*-[fi]\s", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class LockEntry:
    """One pinned version."""

    name: str
    version: Version
    has_hash: bool


def parse_lock(text: str) -> list[LockEntry]:
    """Read the entries of a lock file in pip's requirements form."""
    entries: list[LockEntry] = []
    for block in re.split(r"\n(?=[A-Za-z0-9])", text):
        match = _ENTRY.match(block.strip())
        if match is not None:
            entries.append(
                LockEntry(
                    name=canonicalize_name(match["name"]),
                    version=Version(match["version"]),
                    has_hash=_HASH.search(block) is not None,
                )
            )
    return entries


def declared_requirements(pyproject: str) -> list[Requirement]:
    """Every requirement that ``pyproject.toml`` declares, those of the extras and of the build included."""
    document = tomllib.loads(pyproject)
    project = document["project"]
    texts: list[str] = [*document["build-system"]["requires"], *project.get("dependencies", [])]
    for extra in project.get("optional-dependencies", {}).values():
        texts += extra
    own = canonicalize_name(project["name"])
    return [requirement for requirement in map(Requirement, texts) if canonicalize_name(requirement.name) != own]


def problems(lock: str, pyproject: str) -> list[str]:
    """What is wrong with a lock file for this project; empty where it is current. Needs no network."""
    entries = parse_lock(lock)
    found = [f"{entry.name}=={entry.version} has no hash" for entry in entries if not entry.has_hash]
    found += [f"names an address: {match.group(0).strip()}" for match in _ADDRESS.finditer(lock)]
    locked: dict[str, list[Version]] = {}
    for entry in entries:
        locked.setdefault(entry.name, []).append(entry.version)
    for requirement in declared_requirements(pyproject):
        versions = locked.get(canonicalize_name(requirement.name), [])
        if not versions:
            found.append(f"{requirement} is not locked (./dev lock makes the file anew)")
        elif not any(requirement.specifier.contains(version, prereleases=True) for version in versions):
            listed = ", ".join(map(str, versions))
            found.append(f"{requirement} is not satisfied by the locked {listed} (./dev lock makes the file anew)")
    return found


def relock(root: Path) -> None:
    """Resolve the requirements anew and replace the lock file.

    Raises:
        StepFailedError: No resolution, or no package index within reach.
    """
    fresh = root / ".cache" / "dev" / LOCK_NAME
    fresh.parent.mkdir(parents=True, exist_ok=True)
    # The present lock is the starting point: only what has to change changes.
    fresh.write_text((root / LOCK_NAME).read_text("utf-8"), "utf-8")
    done = subprocess.run(
        ["uv", "pip", "compile", *_UV_OPTIONS, "--output-file", str(fresh), "pyproject.toml"],
        cwd=root,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise StepFailedError(f"uv could not resolve the requirements:\n{done.stderr.strip()}")
    fresh.replace(root / LOCK_NAME)
