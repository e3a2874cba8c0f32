"""Landlock by its system calls: which rights a kernel knows, rulesets, and confining the calling thread.

Only the standard library and ctypes, since the exec launcher imports this in front of every agent.
"""

from __future__ import annotations

import ctypes
import os
import struct
from enum import IntFlag

_CREATE_RULESET = 444
_ADD_RULE = 445
_RESTRICT_SELF = 446
_CREATE_RULESET_VERSION = 1 << 0
_RULE_PATH_BENEATH = 1
_RULE_NET_PORT = 2
_PR_SET_NO_NEW_PRIVS = 38

MINIMUM_ABI = 3
"""Oldest ABI that the runtime accepts: the first that covers truncation (compute-driver contract 5.7)."""
NEWEST_ABI = 7
"""Newest ABI whose rights are known here; a newer kernel is used as this one."""


class FilesystemAccess(IntFlag):
    """Rights on files, with the kernel's bit values."""

    EXECUTE = 1 << 0
    WRITE_FILE = 1 << 1
    READ_FILE = 1 << 2
    READ_DIR = 1 << 3
    REMOVE_DIR = 1 << 4
    REMOVE_FILE = 1 << 5
    MAKE_CHAR = 1 << 6
    MAKE_DIR = 1 << 7
    MAKE_REG = 1 << 8
    MAKE_SOCK = 1 << 9
    MAKE_FIFO = 1 << 10
    MAKE_BLOCK = 1 << 11
    MAKE_SYM = 1 << 12
    REFER = 1 << 13
    TRUNCATE = 1 << 14
    IOCTL_DEV = 1 << 15


class NetworkAccess(IntFlag):
    """Rights on TCP ports, with the kernel's bit values."""

    BIND_TCP = 1 << 0
    CONNECT_TCP = 1 << 1


class Scope(IntFlag):
    """What a confined process may not reach outside its own domain, with the kernel's bit values."""

    ABSTRACT_UNIX_SOCKET = 1 << 0
    SIGNAL = 1 << 1


_ALL_OF_ABI_1 = FilesystemAccess((1 << 13) - 1)
FILE_RIGHTS = (
    FilesystemAccess.EXECUTE
    | FilesystemAccess.WRITE_FILE
    | FilesystemAccess.READ_FILE
    | FilesystemAccess.TRUNCATE
    | FilesystemAccess.IOCTL_DEV
)
"""The rights that make sense on something that is not a directory; the kernel refuses others there."""


def handled_filesystem(abi: int) -> FilesystemAccess:
    """Every filesystem right that a kernel with this ABI can restrict."""
    rights = _ALL_OF_ABI_1
    if abi >= 2:
        rights |= FilesystemAccess.REFER
    if abi >= 3:
        rights |= FilesystemAccess.TRUNCATE
    if abi >= 5:
        rights |= FilesystemAccess.IOCTL_DEV
    return rights


def handled_network(abi: int) -> NetworkAccess:
    """Every TCP right that a kernel with this ABI can restrict."""
    return NetworkAccess.BIND_TCP | NetworkAccess.CONNECT_TCP if abi >= 4 else NetworkAccess(0)


def available_scopes(abi: int) -> Scope:
    """Every scope that a kernel with this ABI can enforce."""
    return Scope.ABSTRACT_UNIX_SOCKET | Scope.SIGNAL if abi >= 6 else Scope(0)


def kernel_abi() -> int:
    """The ABI of the running kernel, at most :data:`NEWEST_ABI`; 0 when Landlock is absent, off or filtered out."""
    found: int = _libc().syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_CREATE_RULESET_VERSION))
    return min(max(found, 0), NEWEST_ABI)


def create_ruleset(*, abi: int, filesystem: FilesystemAccess, network: NetworkAccess, scopes: Scope) -> int:
    """A new ruleset as a close-on-exec file descriptor.

    What is handled and not allowed by a later rule is denied to whoever is confined by it.

    Args:
        abi: The kernel's ABI; rights beyond it must not be asked for.
        filesystem: Filesystem rights to restrict.
        network: TCP rights to restrict.
        scopes: Scopes to enforce.

    Raises:
        OSError: The kernel refused it.
    """
    attributes = struct.pack("=QQQ", filesystem, network, scopes)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    return _checked(
        _libc().syscall(_CREATE_RULESET, attributes[:size], ctypes.c_size_t(size), ctypes.c_uint32(0)),
        "landlock_create_ruleset",
    )


def allow_path(ruleset_fd: int, path_fd: int, access: FilesystemAccess) -> None:
    """Allow *access* on the file or directory tree behind *path_fd*.

    Raises:
        OSError: The kernel refused it.
    """
    rule = struct.pack("=Qi", access, path_fd)
    _checked(
        _libc().syscall(
            _ADD_RULE, ctypes.c_int(ruleset_fd), ctypes.c_int(_RULE_PATH_BENEATH), rule, ctypes.c_uint32(0)
        ),
        "landlock_add_rule",
    )


def allow_port(ruleset_fd: int, port: int, access: NetworkAccess) -> None:
    """Allow *access* on one TCP port.

    Raises:
        OSError: The kernel refused it.
    """
    rule = struct.pack("=QQ", access, port)
    _checked(
        _libc().syscall(_ADD_RULE, ctypes.c_int(ruleset_fd), ctypes.c_int(_RULE_NET_PORT), rule, ctypes.c_uint32(0)),
        "landlock_add_rule",
    )


def forbid_new_privileges() -> None:
    """Set no_new_privs on the calling thread: no execve gains privilege from here on.

    Raises:
        OSError: The kernel refused it.
    """
    arguments = (ctypes.c_ulong(value) for value in (1, 0, 0, 0))
    _checked(_libc().prctl(ctypes.c_int(_PR_SET_NO_NEW_PRIVS), *arguments), "prctl(PR_SET_NO_NEW_PRIVS)")


def restrict_self(ruleset_fd: int) -> None:
    """Confine the calling thread, and all that it starts, by the ruleset. Needs no_new_privs.

    Raises:
        OSError: The kernel refused it.
    """
    _checked(_libc().syscall(_RESTRICT_SELF, ctypes.c_int(ruleset_fd), ctypes.c_uint32(0)), "landlock_restrict_self")


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int, call: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), call)
    return result
