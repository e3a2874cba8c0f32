"""PID 1 looks at itself: who it is, what it may, and what others may see of it.

The runtime refuses to run with more privilege than a workload may have, rather than to drop it: whoever made the
container made a mistake, and the operator should hear of it.
"""

from __future__ import annotations

import ctypes
import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from openshell.isolation.errors import cause_of
from sandbox_runtime.errors import PlatformError

if TYPE_CHECKING:
    from collections.abc import Iterable

_PR_SET_DUMPABLE = 4
_CAPABILITY_SETS = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
_SECCOMP_FILTER = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """What the kernel says of a process's privileges."""

    uids: frozenset[int]
    """Real, effective, saved and filesystem uid."""
    gids: frozenset[int]
    groups: frozenset[int]
    """Supplementary groups."""
    capabilities: frozenset[str]
    """Names of the capability sets that are not empty."""
    no_new_privs: bool
    seccomp_filter: bool


def parse_status(text: str) -> ProcessFacts:
    """Parse ``/proc/PID/status``.

    Raises:
        PlatformError: A field that is needed is missing or malformed.
    """
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    try:
        return ProcessFacts(
            uids=frozenset(int(word) for word in fields["Uid"].split()),
            gids=frozenset(int(word) for word in fields["Gid"].split()),
            groups=frozenset(int(word) for word in fields["Groups"].split()),
            capabilities=frozenset(name for name in _CAPABILITY_SETS if int(fields[name], 16)),
            no_new_privs=int(fields["NoNewPrivs"]) == 1,
            seccomp_filter=int(fields["Seccomp"]) == _SECCOMP_FILTER,
        )
    except (KeyError, ValueError) as error:
        raise PlatformError(f"/proc/self/status does not tell this process's privileges: {error}") from error


def read_own_facts() -> ProcessFacts:
    """The facts of this process.

    Raises:
        PlatformError: procfs is missing or does not tell them.
    """
    try:
        text = Path("/proc/self/status").read_text("ascii", "replace")
    except OSError as error:
        raise PlatformError(f"/proc is needed and cannot be read: {cause_of(error)}") from error
    return parse_status(text)


def privilege_objections(facts: ProcessFacts) -> tuple[str, ...]:
    """What of these privileges a workload may not have; empty when they are the floor."""
    objections = []
    if 0 in facts.uids:
        objections.append("it runs as uid 0")
    if 0 in facts.gids or 0 in facts.groups:
        objections.append("it runs with group 0")
    if facts.capabilities:
        objections.append(f"capabilities are not dropped ({', '.join(sorted(facts.capabilities))})")
    if not facts.no_new_privs:
        objections.append("no_new_privs is not set")
    if not facts.seccomp_filter:
        objections.append("no seccomp filter is in force")
    return tuple(objections)


def identity_objections(
    facts: ProcessFacts, *, uid: int, gid: int, supplementary_gids: Iterable[int]
) -> tuple[str, ...]:
    """How the process differs from the identity that the driver promised; empty when it does not."""
    objections = []
    if facts.uids != {uid}:
        objections.append(f"uid is {_listed(facts.uids)}, not {uid}")
    if facts.gids != {gid}:
        objections.append(f"gid is {_listed(facts.gids)}, not {gid}")
    expected = frozenset(supplementary_gids)
    if facts.groups - {gid} != expected:
        objections.append(f"supplementary groups are {_listed(facts.groups - {gid})}, not {_listed(expected)}")
    return tuple(objections)


def foreign_interfaces(net_dev: str) -> tuple[str, ...]:
    """The network interfaces of a ``/proc/self/net/dev`` other than the loopback."""
    names = (line.partition(":")[0].strip() for line in net_dev.splitlines()[2:])
    return tuple(name for name in names if name and name != "lo")


def hide_from_equals() -> None:
    """Make this process non-dumpable: others of the same uid can neither trace it nor read its memory or files.

    Also turns off core dumps.

    Raises:
        PlatformError: The kernel refused it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_DUMPABLE, ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        number = ctypes.get_errno()
        raise PlatformError(f"prctl(PR_SET_DUMPABLE) failed: {os.strerror(number)}")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(str(number) for number in sorted(numbers)) or "none"
