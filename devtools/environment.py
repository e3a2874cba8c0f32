"""The virtual environment of the repository: made from the lock file, fresh or made anew.

Standard library only: the bootstrap uses it before there is a virtual environment.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import importlib.util
import json
import os
import shutil
import sys
import tomllib
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from devtools import debian
from devtools.console import run_step, say
from devtools.errors import PreconditionError

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
STAMP_NAME = "openshell-docker-stamp"
_PYPROJECT_PARTS = ("build-system", "project")
_SYSTEM_PREFIXES = ("/usr",)
_IGNORED_VARIABLES = ("PYTHONHOME", "PYTHONPATH", "PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_REQUIRE_VIRTUALENV")


def stamp(root: Path, python: tuple[int, int]) -> str:
    """What an environment was made from: lock file, project metadata, Python's minor version, and its place.

    Only the parts of ``pyproject.toml`` that installing reads count, so that a linter's option rebuilds nothing.
    """
    digest = hashlib.sha256((root / "requirements.lock").read_bytes())
    document = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))
    relevant = {part: document.get(part) for part in _PYPROJECT_PARTS}
    relevant["hatch"] = document.get("tool", {}).get("hatch")
    digest.update(json.dumps(relevant, sort_keys=True).encode())
    digest.update(str(root).encode())
    return f"{python[0]}.{python[1]} {digest.hexdigest()}"


def why_stale(root: Path, python: tuple[int, int]) -> str | None:
    """Why the environment must be made anew, or ``None`` where it is fresh. Takes milliseconds."""
    folder = root / ".venv"
    if not (folder / "bin" / "python").exists():
        return "there is none" if not folder.exists() else "its interpreter is gone"
    try:
        have = (folder / STAMP_NAME).read_text("utf-8")
    except OSError:
        return "it was not made by ./dev, or not completed"
    want = stamp(root, python)
    if have == want:
        return None
    if have.split(" ")[0] != want.split(" ")[0]:
        return f"it has Python {have.split(' ')[0]}, and ./dev runs on {want.split(' ')[0]}"
    return "requirements.lock, the project's metadata or the place of the repository changed"


def ensure(root: Path = ROOT) -> Path:
    """Make the environment where it is missing or stale.

    It is built aside and moved into place, so an interrupted build leaves either the old one or none.

    Returns:
        The environment's interpreter.

    Raises:
        PreconditionError: Python's venv module is incomplete here and may not be installed, or the repository's
            folder cannot be written.
        StepFailedError: A step of the build failed.
    """
    version = sys.version_info[:2]
    interpreter = root / ".venv" / "bin" / "python"
    if why_stale(root, version) is None:
        return interpreter
    scratch = root / ".cache" / "dev"
    try:
        scratch.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PreconditionError(
            f"the virtual environment cannot be made: {scratch} cannot be written: {error.strerror}.\n"
            "What to do: run ./dev in a copy of the repository that this user may write to."
        ) from error
    with _alone(scratch / "environment.lock"):
        reason = why_stale(root, version)
        if reason is None:
            return interpreter
        say(f"making the virtual environment .venv: {reason}")
        _ensure_venv_module(scratch / "apt.log")
        _build(root, scratch, version)
    return interpreter


def child_environment(root: Path = ROOT) -> dict[str, str]:
    """Our environment, with the virtual environment first and what would leak into it taken out."""
    environment = {name: value for name, value in os.environ.items() if name not in _IGNORED_VARIABLES}
    environment["VIRTUAL_ENV"] = str(root / ".venv")
    environment["PATH"] = f"{root / '.venv' / 'bin'}{os.pathsep}{environment.get('PATH', os.defpath)}"
    return environment


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    with lock.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another ./dev is making the virtual environment; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _ensure_venv_module(log: Path) -> None:
    if _has_venv():
        return
    minor = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    is_system = str(Path(sys.base_prefix)) in _SYSTEM_PREFIXES
    if is_system and debian.may_install():
        debian.install([f"{minor}-venv"], purpose="Python's venv module", log=log)
        importlib.invalidate_caches()
        if _has_venv():
            return
    advice = f"as root: apt-get install {minor}-venv" if is_system else "install a complete Python, 3.11 or later"
    raise PreconditionError(
        f"{sys.executable} cannot make a virtual environment: its venv or ensurepip module is missing.\n"
        f"What to do: {advice}; then run ./dev again."
    )


def _has_venv() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("venv", "ensurepip"))


def _build(root: Path, scratch: Path, version: tuple[int, int]) -> None:
    final, aside, old = root / ".venv", scratch / "venv-new", scratch / "venv-old"
    temporary = scratch / "tmp"
    for leftover in (aside, old, temporary):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary.mkdir()
    mark = stamp(root, version)
    environment = {name: value for name, value in os.environ.items() if name not in _IGNORED_VARIABLES}
    environment["TMPDIR"] = str(temporary)  # pip leaves there what a signal interrupts
    python = str(aside / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    log = scratch / "environment.log"
    try:
        run_step(
            [sys.executable, "-m", "venv", str(aside)],
            title=f"creating a virtual environment with Python {version[0]}.{version[1]}",
            log=log,
            environment=environment,
        )
        run_step(
            [*pip, "--require-hashes", "-r", str(root / "requirements.lock")],
            title="installing the locked packages, each with its hash checked",
            log=log,
            environment=environment,
        )
        run_step(
            [*pip, "--no-deps", "--no-build-isolation", "-e", str(root)],
            title="installing the project itself, editable",
            log=log,
            environment=environment,
        )
        _relocate(aside, final)
        (aside / STAMP_NAME).write_text(mark, "utf-8")
        if final.is_symlink():
            final.unlink()
        elif final.exists():
            final.rename(old)
        aside.rename(final)
    finally:
        for leftover in (aside, old, temporary):
            shutil.rmtree(leftover, ignore_errors=True)


def _relocate(aside: Path, final: Path) -> None:
    """Name the final place in the scripts, which pip and venv wrote for the place they were made in."""
    before, after = os.fsencode(aside), os.fsencode(final)
    for path in (aside / "pyvenv.cfg", *(aside / "bin").iterdir()):
        if path.is_symlink() or not path.is_file():
            continue
        content = path.read_bytes()
        if before in content and b"\0" not in content:
            path.write_bytes(content.replace(before, after))
