"""Removing what a sandbox consists of. Each step tolerates that somebody else was faster."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

from driver_docker import labels
from driver_docker.engine import (
    EngineAbsentError,
    EngineConflictError,
    EngineError,
    EngineRefusedError,
    EngineUnreachableError,
)

if TYPE_CHECKING:
    from driver_docker.engine import Engine
    from driver_docker.engine_objects import ContainerFacts

_ATTEMPTS: Final = 20
_PAUSE_SECONDS: Final = 0.1
_AUXILIARY_ROLES: Final = frozenset(labels.Role) - {labels.Role.SANDBOX}


async def stop_workload(engine: Engine, container: str, *, grace_seconds: int) -> ContainerFacts:
    """Stop a workload, also one that is paused or has ended, and look at it afterwards.

    Returns:
        How it is now. An engine may have answered that it was stopped although it runs.

    Raises:
        EngineAbsentError: It is gone.
        EngineError: The engine cannot be asked, or refuses: it may run on.
    """
    try:
        await engine.stop_container(container, grace_seconds=grace_seconds)
    except (EngineConflictError, EngineRefusedError):
        if (await engine.inspect_container(container)).status.is_alive:
            # Older engines cannot stop a paused container.
            with contextlib.suppress(EngineConflictError, EngineRefusedError):
                await engine.unpause_container(container)
            await engine.stop_container(container, grace_seconds=grace_seconds)
    return await engine.inspect_container(container)


async def remove_container(engine: Engine, container: str) -> bool:
    """Kill and remove a container, and wait until it is really gone.

    Returns:
        Whether it was there.

    Raises:
        EngineError: It could not be removed.
    """
    for attempt in range(_ATTEMPTS):
        try:
            await engine.remove_container(container)
        except EngineAbsentError:
            return attempt > 0
        except EngineConflictError:
            # "removal already in progress": ends with a 404, which is what is waited for.
            await asyncio.sleep(_PAUSE_SECONDS)
        else:
            return True
    await engine.remove_container(container)
    return True


async def remove_volume(engine: Engine, name: str) -> bool:
    """Remove one of the driver's own volumes; whether it was there.

    Raises:
        EngineError: It could not be removed.
    """
    for _ in range(_ATTEMPTS):
        try:
            await engine.remove_volume(name)
        except EngineAbsentError:
            return False
        except EngineConflictError:
            # The engine lets go of a volume a moment after its last container.
            await asyncio.sleep(_PAUSE_SECONDS)
        else:
            return True
    await engine.remove_volume(name)
    return True


async def remove_auxiliaries(engine: Engine, owner: labels.Owner, sandbox_id: str) -> None:
    """Remove every container of a sandbox but its workload (compute-driver contract 5.9).

    Raises:
        EngineError: One of them is still there.
    """
    for row in await engine.list_containers(labels.sandbox_filter(owner, role=None, sandbox_id=sandbox_id)):
        if row.labels.get(labels.ISOLATION_ROLE) in _AUXILIARY_ROLES:
            await remove_container(engine, row.container_id)


async def remove_sandbox(
    engine: Engine, owner: labels.Owner, sandbox_id: str, recorded: frozenset[str] = frozenset()
) -> bool:
    """Remove every container and volume with the sandbox's id and this driver's labels.

    Args:
        engine: The engine.
        owner: This driver.
        sandbox_id: The sandbox.
        recorded: The containers that its record names. They go too where they carry the name of another driver
            instance, as they do once the state folder's name of this one was replaced, with their volumes.

    Returns:
        Whether there was anything.

    Raises:
        EngineError: Something is still there; the call may be repeated.
    """
    wanted = labels.sandbox_filter(owner, role=None, sandbox_id=sandbox_id)
    rows = await engine.list_containers(wanted)
    others = await _under_another_name(engine, owner, sandbox_id, recorded - {row.container_id for row in rows})
    # Supervisors first, so that none is left talking to a workload that is going away.
    rows = tuple(sorted(rows, key=lambda row: row.labels.get(labels.ISOLATION_ROLE) == labels.Role.SANDBOX))
    failures: list[EngineError] = []
    found = False
    for container in (*(row.container_id for row in rows), *(each.container_id for each in others)):
        try:
            found |= await remove_container(engine, container)
        except EngineUnreachableError:
            raise
        except EngineError as error:
            failures.append(error)
    volumes = await engine.list_volumes(labels.owner_labels(owner) | {labels.SANDBOX_ID: sandbox_id})
    if mounted := {name for each in others for name in each.volume_names}:
        shared = await engine.list_volumes(_labels_of_any_owner(owner, sandbox_id))
        volumes = (*volumes, *(each for each in shared if each.name in mounted and each not in volumes))
    for volume in volumes:
        try:
            found |= await remove_volume(engine, volume.name)
        except EngineUnreachableError:
            raise
        except EngineError as error:
            failures.append(error)
    if failures:
        raise failures[0]
    return found


async def _under_another_name(
    engine: Engine, owner: labels.Owner, sandbox_id: str, recorded: frozenset[str]
) -> tuple[ContainerFacts, ...]:
    """Containers of a sandbox's record that are there, but not under this driver's name; supervisors first.

    Raises:
        EngineError: One cannot be looked at, or is not of this sandbox: nothing says that it may go.
    """
    found: list[ContainerFacts] = []
    for container in sorted(recorded):
        try:
            facts = await engine.inspect_container(container)
        except EngineAbsentError:
            continue
        if not _labels_of_any_owner(owner, sandbox_id).items() <= facts.labels.items():
            raise EngineConflictError(
                f"container {facts.name}, which the record of sandbox {sandbox_id} names, does not carry the labels of "
                "that sandbox, so it is not removed; remove it by hand if it is the sandbox's"
            )
        found.append(facts)
    return tuple(sorted(found, key=lambda each: each.labels.get(labels.ISOLATION_ROLE) == labels.Role.SANDBOX))


def _labels_of_any_owner(owner: labels.Owner, sandbox_id: str) -> dict[str, str]:
    shared = labels.owner_labels(owner) | {labels.SANDBOX_ID: sandbox_id}
    del shared[labels.DRIVER_OWNER]
    return shared
