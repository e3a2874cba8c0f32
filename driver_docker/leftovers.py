"""`gc`: things that carry this driver's own owner label and that no sandbox uses (field report 52).

Ownership is decided by the owner label alone, never by a name: what another driver made is left alone, also where it
was given the same namespace. Beside a running driver only what it does not know goes: things of sandboxes without a
record, and only once they are older than a grace. Records are written before anything is made, so a launch that has
just begun is never in the way.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final

from driver_docker import labels
from driver_docker.bind_socket import NAMESPACE_LOCK, FileLock
from driver_docker.engine import EngineAbsentError, EngineConflictError
from driver_docker.errors import ConfigurationError, DriverError
from driver_docker.sandbox_record import RecordPhase
from driver_docker.services import now
from driver_docker.teardown import remove_container

if TYPE_CHECKING:
    from datetime import datetime

    from driver_docker.config import DriverConfig
    from driver_docker.engine import Engine
    from driver_docker.engine_objects import ContainerRow, VolumeFacts
    from driver_docker.records import RecordStore, StoredRecords, UnreadableRecord
    from driver_docker.sandbox_record import SandboxRecord

GRACE_SECONDS: Final = 60.0
"""How old a thing must be before it is removed beside a running driver."""
_KERNEL_LOCKS: Final = Path("/proc/locks")
_DEVICE_COLONS: Final = 2
_ADOPTED: Final = frozenset({RecordPhase.ACTIVE, RecordPhase.STOPPED})


class LeftoverKind(StrEnum):
    """What a leftover is."""

    CONTAINER = "container"
    VOLUME = "volume"
    STATE = "state folder"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """One thing that can go."""

    kind: LeftoverKind
    name: str
    identifier: str
    """Container id, volume name or folder name."""
    sandbox_id: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """What became of a leftover."""

    leftover: Leftover
    error: str = ""
    """Why it is still there; empty where it is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """All leftovers, and how many things in this namespace are another driver's."""

    leftovers: tuple[Leftover, ...]
    foreign: int
    driver_runs: bool
    unreadable: tuple[UnreadableRecord, ...] = ()
    """Sandboxes whose record cannot be read; nothing of them is a leftover."""


class Sweeper:
    """Finds leftovers of one namespace, and removes them."""

    def __init__(self, engine: Engine, store: RecordStore, config: DriverConfig) -> None:
        self._engine = engine
        self._store = store
        self._namespace = config.sandbox_label

    async def survey(self) -> Survey:
        """Look, and change nothing.

        Raises:
            RecordError: The state folder cannot be read.
            EngineError: The engine cannot be asked.
        """
        return await self._survey(driver_runs=await asyncio.to_thread(is_locked, self._store.directory))

    async def sweep(self) -> tuple[Survey, tuple[Removal, ...]]:
        """Remove every leftover. No driver of this namespace can come up meanwhile.

        Raises:
            RecordError: The state folder cannot be read.
            EngineError: The engine cannot be asked.
        """
        lock: FileLock | None = None
        with contextlib.suppress(ConfigurationError):
            # Without a name there is no owner, and so nothing to remove.
            if await asyncio.to_thread(self._store.driver_name) is not None:
                lock = FileLock(self._store.directory / NAMESPACE_LOCK, held_by="a driver runs")
        try:
            found = await self._survey(driver_runs=lock is None)
            removals = [await self._remove(leftover) for leftover in found.leftovers]
        finally:
            if lock is not None:
                lock.release()
        return found, tuple(removals)

    async def _survey(self, *, driver_runs: bool) -> Survey:
        # The engine first and the records second: whatever was made since has a record by now.
        shared = {labels.MANAGED_BY: labels.MANAGED_BY_OPENSHELL, labels.SANDBOX_NAMESPACE: self._namespace}
        containers = await self._engine.list_containers(shared)
        volumes = await self._engine.list_volumes(shared)
        name = await asyncio.to_thread(self._store.driver_name)
        if name is None:
            return Survey(leftovers=(), foreign=len(containers) + len(volumes), driver_runs=driver_runs)
        owner = labels.Owner(namespace=self._namespace, driver=name)
        own = [row for row in containers if labels.is_owned(row.labels, owner)]
        own_volumes = [volume for volume in volumes if labels.is_owned(volume.labels, owner)]
        foreign = len(containers) + len(volumes) - len(own) - len(own_volumes)
        stored = await asyncio.to_thread(self._store.load)
        if driver_runs:
            found = await self._unknown_to_driver(own, own_volumes, stored.known)
        else:
            found = await self._unused(own, own_volumes, stored)
        return Survey(leftovers=tuple(found), foreign=foreign, driver_runs=driver_runs, unreadable=stored.unreadable)

    async def _unknown_to_driver(
        self, own: list[ContainerRow], volumes: list[VolumeFacts], known: frozenset[str]
    ) -> list[Leftover]:
        present = now()
        found = []
        for row in own:
            sandbox_id = row.labels.get(labels.SANDBOX_ID, "")
            if not sandbox_id or sandbox_id in known:
                continue
            with contextlib.suppress(EngineAbsentError):
                facts = await self._engine.inspect_container(row.container_id)
                if _is_old(facts.created_at, present):
                    found.append(_container(row, "no record of its sandbox"))
        for volume in volumes:
            sandbox_id = volume.labels.get(labels.SANDBOX_ID, "")
            if sandbox_id and sandbox_id not in known and _is_old(volume.created_at, present):
                found.append(_volume(volume, "no record of its sandbox"))
        return found

    async def _unused(
        self, own: list[ContainerRow], volumes: list[VolumeFacts], stored: StoredRecords
    ) -> list[Leftover]:
        found: list[Leftover] = []
        mounted: set[str] = set()
        records = {record.sandbox_id: record for record in stored.records}
        unreadable = stored.known - records.keys()
        for row in own:
            why = "" if row.labels.get(labels.SANDBOX_ID) in unreadable else _why_unused(row, records)
            if why:
                found.append(_container(row, why))
                continue
            with contextlib.suppress(EngineAbsentError):
                mounted.update((await self._engine.inspect_container(row.container_id)).volume_names)
        for volume in volumes:
            sandbox_id = volume.labels.get(labels.SANDBOX_ID, "")
            record = records.get(sandbox_id)
            if (
                volume.name in mounted
                or sandbox_id in unreadable
                or (record is not None and record.phase is not RecordPhase.FAILED)
            ):
                continue
            of_sandbox = labels.SANDBOX_ID in volume.labels
            if of_sandbox:
                why = "its sandbox never came up" if record is not None else "no record of its sandbox"
            else:
                why = "no container of this driver mounts it"
            found.append(_volume(volume, why))
        found += [_state(str(self._store.directory / folder), folder) for folder in stored.without]
        return found

    async def _remove(self, leftover: Leftover) -> Removal:
        try:
            if leftover.kind is LeftoverKind.CONTAINER:
                await remove_container(self._engine, leftover.identifier)
            elif leftover.kind is LeftoverKind.VOLUME:
                await self._remove_volume(leftover)
            else:
                await asyncio.to_thread(self._store.remove, leftover.identifier)
        except EngineAbsentError:
            return Removal(leftover=leftover)
        except EngineConflictError as error:
            return Removal(leftover=leftover, error=f"in use: {error.public_message}")
        except DriverError as error:
            return Removal(leftover=leftover, error=error.public_message)
        return Removal(leftover=leftover)

    async def _remove_volume(self, leftover: Leftover) -> None:
        """By name, which a new launch of the same sandbox would use again: so look once more who owns it now."""
        if leftover.sandbox_id:
            stored = await asyncio.to_thread(self._store.load)
            failed = {record.sandbox_id for record in stored.records if record.phase is RecordPhase.FAILED}
            if leftover.sandbox_id in stored.known - failed:
                raise EngineConflictError("its sandbox was created again meanwhile")
        await self._engine.remove_volume(leftover.identifier)


def _why_unused(row: ContainerRow, records: dict[str, SandboxRecord]) -> str:
    """Why nothing uses a container while no driver runs; empty where something does, or the next driver decides."""
    record = records.get(row.labels.get(labels.SANDBOX_ID, ""))
    if record is None:
        return "no record of its sandbox" if row.labels.get(labels.SANDBOX_ID) else "a helper of a driver that ended"
    if record.phase is RecordPhase.FAILED:
        return "its sandbox never came up"
    if record.phase in _ADOPTED and row.container_id not in {record.workload_id, record.supervisor_id}:
        return "of an earlier start of its sandbox"
    return ""


def _is_old(created_at: datetime | None, present: datetime) -> bool:
    return created_at is not None and (present - created_at).total_seconds() >= GRACE_SECONDS


def _container(row: ContainerRow, why: str) -> Leftover:
    return Leftover(
        kind=LeftoverKind.CONTAINER,
        name=row.name,
        identifier=row.container_id,
        sandbox_id=row.labels.get(labels.SANDBOX_ID, ""),
        why=why,
    )


def _volume(volume: VolumeFacts, why: str) -> Leftover:
    return Leftover(
        kind=LeftoverKind.VOLUME,
        name=volume.name,
        identifier=volume.name,
        sandbox_id=volume.labels.get(labels.SANDBOX_ID, ""),
        why=why,
    )


def _state(path: str, folder: str) -> Leftover:
    return Leftover(kind=LeftoverKind.STATE, name=path, identifier=folder, sandbox_id=folder, why="no record in it")


def is_locked(directory: Path) -> bool:
    """Whether a driver holds the lock of a namespace's folder. Makes nothing.

    The kernel's list of locks is read, since trying the lock would keep a driver from coming up at that moment.
    """
    file = directory / NAMESPACE_LOCK
    try:
        inode = str(file.lstat().st_ino)
        listed = _KERNEL_LOCKS.read_text("ascii").splitlines()
    except OSError:
        return False
    # 1: FLOCK  ADVISORY  WRITE 2021 fe:00:9437207 0 EOF; the device is not compared, as overlays name another.
    held = [line.split() for line in listed if " FLOCK " in line and " WRITE " in line]
    return any(
        word.rpartition(":")[2] == inode for words in held for word in words if word.count(":") == _DEVICE_COLONS
    )
