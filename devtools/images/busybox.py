"""Where the workload's static busybox comes from."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from devtools.images.elf import is_elf, read_elf
from devtools.images.errors import BuildInputError

_PACKAGE = "busybox-static"
_PLACES = ("bin/busybox", "usr/bin/busybox")
_FETCH_TIMEOUT_SECONDS = 120.0


def find_busybox(kept_in: Path | None = None) -> Path:
    """Find a static busybox: on the machine, else kept from before, else in the distribution's package.

    The package is unpacked, not installed: that needs no root and changes nothing on the machine.

    Args:
        kept_in: A folder to keep it in; without one no package is fetched.

    Raises:
        BuildInputError: when there is none; the text names the package.
    """
    for name in ("busybox.static", "busybox"):
        if (found := shutil.which(name)) and _is_static(path := Path(found).resolve()):
            return path
    why = ""
    if kept_in is not None:
        kept = kept_in / "busybox"
        if kept.is_file() and _is_static(kept):
            return kept
        try:
            return _fetch(kept)
        except (OSError, subprocess.SubprocessError) as error:
            why = f" ({_last_line(error)})"
    raise BuildInputError(
        f"the workload image needs a static busybox and this machine has none{why}; "
        f"install the Debian package {_PACKAGE}"
    )


def _is_static(path: Path) -> bool:
    return is_elf(path) and not read_elf(path.read_bytes()).interpreter


def _fetch(kept: Path) -> Path:
    with tempfile.TemporaryDirectory(prefix="busybox-", dir=kept.parent) as scratch:
        folder = Path(scratch)
        # apt downloads as another user where it may; that user cannot write here, which apt says and then goes on.
        _run(["apt-get", "--quiet", "--quiet", "download", _PACKAGE], folder)
        for package in folder.glob(f"{_PACKAGE}*.deb"):
            _run(["dpkg-deb", "--extract", package.name, "root"], folder)
        for place in _PLACES:
            found = folder / "root" / place
            if found.is_file() and _is_static(found):
                found.chmod(0o755)
                return found.rename(kept)
    raise FileNotFoundError(f"{_PACKAGE} holds no static busybox")


def _run(command: list[str], folder: Path) -> None:
    subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=_FETCH_TIMEOUT_SECONDS)


def _last_line(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError) and (lines := str(error.stderr).strip().splitlines()):
        return lines[-1]
    return str(error)
