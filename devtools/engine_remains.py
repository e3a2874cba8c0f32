"""Taking back everything a private engine left: processes, mounts, control groups, bridge, folders.

Used by the keeper at an orderly end, and by the next run where the keeper was killed. Every process is checked to be
ours before it is ended.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from devtools import bridge, control_groups, kernel
from devtools.engine_record import EngineRecord, ProcessIdentity, boot_id, command_line

if TYPE_CHECKING:
    from collections.abc import Iterable

GRACE_SECONDS = 20.0
KILL_SECONDS = 10.0
_PROGRAMS = ("containerd", "dockerd", "docker-", "runc")


def processes_of(record: EngineRecord, *, contained_only: bool = False) -> list[ProcessIdentity]:
    """Living processes that belong to an engine: by its folder in their arguments, or by their control group.

    Args:
        record: The engine.
        contained_only: Leave out the engine's own programs: what is in its containers alone.
    """
    found: list[ProcessIdentity] = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        pid = int(folder.name)
        try:
            groups = (folder / "cgroup").read_text("utf-8")
        except OSError:
            continue
        arguments = command_line(pid)
        # A client may well name the engine's socket; only the engine's own programs are taken by their arguments.
        is_program = not contained_only and Path(arguments.split(" ")[0]).name.startswith(_PROGRAMS)
        is_ours = f"/{record.control_group}/" in groups or (is_program and f"{record.run_folder}/" in arguments)
        identity = ProcessIdentity.of(pid) if is_ours else None
        if identity is not None:
            found.append(identity)
    return found


def wait_ended(identity: ProcessIdentity, timeout_seconds: float) -> bool:
    """Wait for a process to end, whoever's child it is.

    Returns:
        Whether it has ended.
    """
    try:
        handle = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return True
    try:
        if ProcessIdentity.of(identity.pid) != identity:
            return True
        poller = select.poll()
        poller.register(handle, select.POLLIN)
        return bool(poller.poll(timeout_seconds * 1000))
    finally:
        os.close(handle)


def send(identity: ProcessIdentity, number: signal.Signals) -> None:
    """Send a signal to exactly this process; one that is gone is no error."""
    with suppress(ProcessLookupError):
        handle = os.pidfd_open(identity.pid)
        try:
            if ProcessIdentity.of(identity.pid) == identity:
                signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)


def end(identity: ProcessIdentity, grace_seconds: float = GRACE_SECONDS) -> None:
    """Ask a process to end, and kill it where it does not within the grace."""
    send(identity, signal.SIGTERM)
    if not wait_ended(identity, grace_seconds):
        send(identity, signal.SIGKILL)
        wait_ended(identity, KILL_SECONDS)


def kill_all(identities: Iterable[ProcessIdentity]) -> None:
    """Kill processes and wait until they are gone, bounded as a whole."""
    listed = list(identities)
    for identity in listed:
        send(identity, signal.SIGKILL)
    deadline = time.monotonic() + KILL_SECONDS
    for identity in listed:
        wait_ended(identity, max(0.0, deadline - time.monotonic()))


def unmount_below(folders: Iterable[str]) -> None:
    """Detach every mount of our namespace that lies in the folders, the deepest first."""
    prefixes = tuple(f"{folder.rstrip('/')}/" for folder in folders)
    lines = Path("/proc/self/mountinfo").read_text("utf-8").splitlines()
    targets = [line.split(" ")[4].replace("\\040", " ") for line in lines]
    for target in sorted((target for target in targets if target.startswith(prefixes)), key=len, reverse=True):
        with suppress(OSError):
            kernel.detach(target)


def remove_traces(record: EngineRecord) -> None:
    """Remove what is not a process: mounts, control groups, bridge, run folder, folders made for the engine."""
    unmount_below((record.data_folder, record.run_folder))
    control_groups.remove(record.control_group)
    if record.bridge:
        bridge.remove(record.bridge)
    shutil.rmtree(record.run_folder, ignore_errors=True)
    for folder in reversed(record.made_folders):
        with suppress(OSError):
            Path(folder).rmdir()


def reclaim(path: Path) -> list[str]:
    """End and remove what an engine left whose keeper was killed.

    Args:
        path: Where the record of the engine is.

    Returns:
        What had to be ended, for the user.
    """
    record = EngineRecord.read(path)
    if record is None:
        path.unlink(missing_ok=True)
        return []
    ended: list[str] = []
    if record.boot_id == boot_id():
        kill_all(processes_of(record, contained_only=True))
        for role, identity, mark in (
            ("keeper", record.keeper, str(path)),
            ("dockerd", record.dockerd, record.data_folder),
        ):
            if identity is not None and identity.is_alive(mentioning=mark):
                end(identity)
                ended.append(f"{role} {identity.pid}")
        rest = processes_of(record)
        kill_all(rest)
        if rest:
            ended.append(f"{len(rest)} of its processes")
    remove_traces(record)
    path.unlink(missing_ok=True)
    return ended
