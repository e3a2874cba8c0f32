"""The few Linux calls that Python 3.11 does not offer."""

from __future__ import annotations

import ctypes
import os

_CLONE_NEWNS = 0x00020000
_MS_REC = 0x4000
_MS_SLAVE = 1 << 19
_MNT_DETACH = 2
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _call(name: str, *arguments: object) -> None:
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    if function(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def leave_mount_namespace() -> None:
    """Enter a mount namespace of our own; mounts made outside still arrive, ours stay here and end with it."""
    _call("unshare", _CLONE_NEWNS)
    _call("mount", b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_SLAVE), None)


def mount(kind: str, target: str, options: str = "") -> None:
    """Mount a filesystem that has no device."""
    _call("mount", kind.encode(), os.fsencode(target), kind.encode(), ctypes.c_ulong(0), options.encode() or None)


def detach(target: str) -> None:
    """Unmount now, and let the kernel finish when the last user is gone."""
    _call("umount2", os.fsencode(target), _MNT_DETACH)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, in place of the machine's init."""
    _call("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent(signal_number: int) -> None:
    """Have the kernel send this process a signal when its parent ends."""
    _call("prctl", _PR_SET_PDEATHSIG, signal_number, 0, 0, 0)
