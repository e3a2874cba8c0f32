"""Traces of one machine that must not be in the repository: absolute paths and addresses of package indexes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

_GENERATED = ("sdk/openshell/wire/", "sdk/openshell/_messages/")
_LARGEST_BYTES = 2_000_000
_HOME = re.compile(r"(?<![\w.])/(?:home/(?!user\b|agent\b|sandbox\b)[a-z][\w-]{2,}|root/\.?\w)")
# Written in parts, so that this file does not hold what it looks for.
_INDEX_HOSTS = re.compile(r"\b(?:" + "|".join(("py" + r"pi\.org", "python" + r"hosted\.org")) + r")\b")


def tracked_files(root: Path) -> list[str]:
    """Names of the files that are or could be committed; without git, every file outside hidden folders."""
    try:
        done = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=root,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        paths = (path for path in root.rglob("*") if path.is_file())
        names = [path.relative_to(root) for path in paths]
        return sorted(
            name.as_posix()
            for name in names
            if "__pycache__" not in name.parts and not any(part.startswith(".") for part in name.parts[:-1])
        )
    return sorted({name for name in done.stdout.decode().split("\0") if name and (root / name).is_file()})


def traces_in(text: str, root: Path) -> list[tuple[int, str]]:
    """Line number and finding for every trace in a text."""
    # A repository at the top, such as /app, has a name that other texts use in good faith.
    places = [f"{root}/"] if len(root.parts) > 2 else []
    found: list[tuple[int, str]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        found += [(number, f"path of this machine: {place}") for place in places if place in line]
        found += [(number, f"path of somebody's home: {match.group(0)}") for match in _HOME.finditer(line)]
        found += [(number, f"package index: {match.group(0)}") for match in _INDEX_HOSTS.finditer(line)]
    return found


def traces(root: Path) -> list[str]:
    """Every trace in the repository's own text files, as ``file:line: finding``."""
    found: list[str] = []
    for name in tracked_files(root):
        path = root / name
        if name.startswith(_GENERATED) or path.stat().st_size > _LARGEST_BYTES:
            continue
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{name}:{line}: {finding}" for line, finding in traces_in(text, root)]
    return found
