"""Installing packages of a Debian family system, without starting a service.

Standard library only: the bootstrap uses it before there is a virtual environment.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from devtools.console import run_step, say
from devtools.errors import StepFailedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

POLICY = Path("/usr/sbin/policy-rc.d")
"""Asked by maintainer scripts before they start a service; exit 101 forbids it."""

_SAVED_SUFFIX = ".before-openshell-docker"
_FORBIDS = 101
_DOWNLOAD_TIMEOUT_SECONDS = 120.0
_OUR_POLICY = f"""\
#!/bin/sh
# Written by OpenShell-Docker's ./dev while it installs packages; removed afterwards.
exit {_FORBIDS}
"""


def may_install() -> bool:
    """Whether packages can be installed here: root, with apt and dpkg."""
    return os.geteuid() == 0 and shutil.which("apt-get") is not None and shutil.which("dpkg") is not None


def install(packages: Sequence[str], *, purpose: str, log: Path, policy: Path = POLICY) -> None:
    """Install packages; no service is started by it, and none is left enabled by it.

    Args:
        packages: Names of Debian packages.
        purpose: What they are for, told to the user.
        log: Where the output of apt goes.
        policy: The file that forbids service starts; a parameter for tests.

    Raises:
        StepFailedError: apt failed; the text holds the end of its output.
    """
    names = " ".join(packages)
    with services_forbidden(policy):
        if not all(_is_known(name) for name in packages):
            _update(log)
        command = ["install", "--yes", "--no-install-recommends", *packages]
        title = f"installing {names} ({purpose})"
        try:
            _apt(command, title=title, log=log, interruptible=False)
        except StepFailedError:
            # The usual cause is an outdated list that names files which are gone from the mirror.
            _update(log)
            _apt(command, title=title, log=log, interruptible=False)


def unpack_program(package: str, place: str, kept: Path) -> Path:
    """Take one program out of a package without installing it: that needs no root and changes nothing on the machine.

    Args:
        package: Name of a Debian package.
        place: Where the program is in it, without the first slash.
        kept: Where it is kept.

    Raises:
        StepFailedError: The package cannot be had, or has no such program.
    """
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{package}-", dir=kept.parent) as scratch:
        folder = Path(scratch)
        try:
            _quietly(["apt-get", "--quiet", "--quiet", "download", package], folder)
            for archive in folder.glob(f"{package}_*.deb"):
                _quietly(["dpkg-deb", "--extract", archive.name, "root"], folder)
            program = folder / "root" / place
            program.chmod(0o755)
            # Renamed, so that nobody ever finds half of it.
            return program.replace(kept)
        except (OSError, subprocess.SubprocessError) as error:
            lines = str(getattr(error, "stderr", None) or error).strip().splitlines()
            why = lines[-1] if lines else type(error).__name__
            raise StepFailedError(f"{place} of the Debian package {package} cannot be had: {why}") from error


def _quietly(command: list[str], folder: Path) -> None:
    subprocess.run(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
        timeout=_DOWNLOAD_TIMEOUT_SECONDS,
    )


def read_lists_for(package: str, *, log: Path) -> bool:
    """Read the package lists where a package is not known yet.

    Returns:
        Whether the package became known by it.
    """
    if not may_install() or _is_known(package):
        return False
    _update(log)
    return _is_known(package)


def leave_disabled(units: Sequence[str]) -> None:
    """Take back that an installation enabled units for the next boot. Units that are not there are no error."""
    if shutil.which("systemctl") is None:
        return
    for unit in units:
        subprocess.run(["systemctl", "disable", unit], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    say(f"the services {', '.join(units)} stay off; `systemctl enable --now docker` turns Docker's on")


def _is_known(package: str) -> bool:
    done = subprocess.run(
        ["apt-cache", "policy", package], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    candidates = [line.split(":", 1)[1].strip() for line in done.stdout.splitlines() if "Candidate:" in line]
    return bool(candidates) and candidates[0] != "(none)"


def _update(log: Path) -> None:
    """Read the package lists. A source that fails is told and passed over: another may well have the package."""
    try:
        _apt(["update"], title="reading the package lists (apt-get update)", log=log)
    except StepFailedError as error:
        say(f"not every package list could be read: {str(error).splitlines()[-1]}")


def _apt(arguments: list[str], *, title: str, log: Path, interruptible: bool = True) -> None:
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "NEEDRESTART_MODE": "l", "LC_ALL": "C.UTF-8"}
    command = ["apt-get", "--quiet", "-o", "DPkg::Lock::Timeout=300", "-o", "Dpkg::Use-Pty=0", *arguments]
    run_step(command, title=title, log=log, environment=environment, interruptible=interruptible)


@contextmanager
def services_forbidden(policy: Path = POLICY) -> Iterator[None]:
    """Forbid service starts inside the block, and put the machine's own policy back exactly.

    An existing policy that forbids already is left alone; another is moved aside and moved back. A policy that an
    interrupted run left moved aside is put back first.
    """
    saved = policy.with_name(policy.name + _SAVED_SUFFIX)
    if saved.exists():
        saved.replace(policy)
    elif _is_ours(policy):
        policy.unlink()
    existed = policy.exists()
    if existed and _asked(policy) == _FORBIDS:
        yield
        return
    if existed:
        policy.rename(saved)
    try:
        policy.parent.mkdir(parents=True, exist_ok=True)
        policy.write_text(_OUR_POLICY, "utf-8")
        policy.chmod(0o755)
        yield
    finally:
        if existed:
            saved.replace(policy)
        else:
            policy.unlink(missing_ok=True)


def _is_ours(policy: Path) -> bool:
    try:
        return policy.read_text("utf-8") == _OUR_POLICY
    except (OSError, UnicodeDecodeError):
        return False


def _asked(policy: Path) -> int:
    try:
        done = subprocess.run(
            [str(policy), "docker", "start"], stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return -1
    return done.returncode
