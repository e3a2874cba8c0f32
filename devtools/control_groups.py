"""Control groups: mounting them where the machine has not, and removing the private engine's."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from devtools import kernel

_MOUNT_POINT = Path("/sys/fs/cgroup")
_NEEDED_V1 = {"devices", "memory", "pids"}


def mount_points(mountinfo: str) -> list[str]:
    """Where control group hierarchies are mounted, from the text of ``/proc/self/mountinfo``."""
    found: list[str] = []
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        if after.split(" ")[0] in {"cgroup", "cgroup2"}:
            found.append(before.split(" ")[4])
    return found


def v1_controllers(table: str) -> list[str]:
    """Enabled controllers, from the text of ``/proc/cgroups``."""
    rows = [line.split() for line in table.splitlines() if line and not line.startswith("#")]
    return [row[0] for row in rows if row[3] == "1"]


def ensure_mounted() -> bool:
    """Mount control groups where nobody has: version 1 where the kernel still has its controllers, else version 2.

    Call it in a mount namespace of our own, so that the mounts end with the engine.

    Returns:
        Whether something was mounted.

    Raises:
        OSError: They cannot be mounted; a Docker Engine cannot run here.
    """
    if mount_points(Path("/proc/self/mountinfo").read_text("utf-8")):
        return False
    try:
        controllers = v1_controllers(Path("/proc/cgroups").read_text("utf-8"))
    except FileNotFoundError:
        controllers = []
    if not set(controllers) >= _NEEDED_V1:
        kernel.mount("cgroup2", str(_MOUNT_POINT))
        return True
    kernel.mount("tmpfs", str(_MOUNT_POINT), "mode=755")
    for name in controllers:
        folder = _MOUNT_POINT / name
        folder.mkdir()
        kernel.mount("cgroup", str(folder), name)
    return True


def remove(name: str) -> None:
    """Remove a control group and those below it from every hierarchy; what still holds a process stays."""
    for point in mount_points(Path("/proc/self/mountinfo").read_text("utf-8")):
        top = Path(point) / name
        for folder, _, _ in os.walk(top, topdown=False):
            with suppress(OSError):
                Path(folder).rmdir()
