"""What a new driver does with what an earlier one left: adopt what runs, finish what was begun, remove the rest.

Nothing is touched that does not carry this driver's own owner label (compute-driver contract 5.2 item 7).
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from driver_docker import labels, log_secrets
from driver_docker.engine import EngineAbsentError, EngineError, EngineUnreachableError
from driver_docker.engine_objects import ContainerStatus
from driver_docker.errors import DriverError, RecordError
from driver_docker.lifecycle import interrupted
from driver_docker.records import AUTH_FILE, LAUNCH_FILES
from driver_docker.sandbox_record import Failure, RecordPhase
from driver_docker.services import now
from driver_docker.supervisor_files import read_proxy_auth
from driver_docker.teardown import remove_container, remove_sandbox, remove_volume
from driver_docker.verdict import Reason
from openshell.isolation.documents import AuthBundle, DocumentError

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from driver_docker.engine_objects import ContainerRow
    from driver_docker.records import StoredRecords
    from driver_docker.sandbox_record import SandboxRecord
    from driver_docker.sandboxes import Sandbox
    from driver_docker.services import Services

_KEPT: Final = frozenset({RecordPhase.STARTING, RecordPhase.ACTIVE, RecordPhase.STOPPING, RecordPhase.STOPPED})
"""Phases in which the containers that a record names are kept."""


async def reclaim(services: Services) -> None:
    """Fill the table from the records and bring engine and records together.

    A record that is there and cannot be read says that its sandbox is here: nothing of it is touched. Only where there
    is no record at all is something a leftover.

    Raises:
        RecordError: The state folder cannot be read.
        EngineUnreachableError: The engine cannot be asked.
    """
    await _tolerant(services, "files of writes that were cut", services.disk.run(services.store.sweep))
    stored = await services.disk.run(services.store.load)
    for unreadable in stored.unreadable:
        services.table.unreadable[unreadable.sandbox_id] = unreadable.why
        services.log.error("sandbox left alone", sandbox_id=unreadable.sandbox_id, error=unreadable.why)
    rows = await services.engine.list_containers(labels.owner_labels(services.owner))
    for record in stored.records:
        await _take_over(services, record)
    for row in rows:
        if not _is_current(row, stored):
            await _remove(services, row)
    for volume in await services.engine.list_volumes(labels.owner_labels(services.owner)):
        sandbox_id = volume.labels.get(labels.SANDBOX_ID)
        if sandbox_id is not None and sandbox_id not in stored.known:
            await _tolerant(services, volume.name, remove_volume(services.engine, volume.name))
    for folder in stored.without:
        services.log.warning("state folder without a record is removed", sandbox_id=folder)
        await _tolerant(services, f"state folder {folder}", services.remove_record(folder))


def _is_current(row: ContainerRow, stored: StoredRecords) -> bool:
    """Whether a container is the workload or supervisor that a record names, or may be."""
    sandbox_id = row.labels.get(labels.SANDBOX_ID, "")
    record = next((each for each in stored.records if each.sandbox_id == sandbox_id), None)
    if record is None:
        return sandbox_id in stored.known
    return record.phase in _KEPT and row.container_id in {record.workload_id, record.supervisor_id}


async def _remove(services: Services, row: ContainerRow) -> None:
    sandbox_id = row.labels.get(labels.SANDBOX_ID, "")
    services.log.info("leftover container removed", container=row.name, sandbox_id=sandbox_id)
    await _tolerant(services, row.name, remove_container(services.engine, row.container_id))


async def _tolerant(services: Services, what: str, removal: Awaitable[object]) -> bool:
    """Carry out a removal; one that engine or disk refuses must not keep the driver from serving everything else.

    Raises:
        EngineUnreachableError: The engine cannot be asked.
    """
    try:
        await removal
    except EngineUnreachableError:
        raise
    except (EngineError, RecordError) as error:
        services.log.warning("leftover not removed", what=what, error=error.message)
        return False
    return True


async def _take_over(services: Services, record: SandboxRecord) -> None:
    sandbox = services.table.add(record)
    containers = sandbox.container_ids
    if record.phase is RecordPhase.DELETING:
        removal = remove_sandbox(services.engine, services.owner, record.sandbox_id, containers)
        if await _tolerant(services, record.sandbox_id, removal) and await _tolerant(
            services, f"state folder {record.sandbox_id}", services.remove_record(record.sandbox_id)
        ):
            services.log_of(sandbox).info("interrupted deletion finished")
        return  # or else each look tries again
    if record.phase is RecordPhase.PROVISIONING:
        failure = Failure(
            reason=Reason.CONTAINER_CREATE_FAILED, message=interrupted().public_message, at=now(), untold=True
        )
        sandbox.record = record.changed(now(), phase=RecordPhase.FAILED, failure=failure)
        services.log_of(sandbox).warning("launch failed", reason=failure.reason, message=failure.message)
        await services.save_quietly(sandbox)
    if sandbox.record.phase is RecordPhase.FAILED:
        files_gone = await services.remove_files(sandbox, LAUNCH_FILES)
        removal = remove_sandbox(services.engine, services.owner, record.sandbox_id, containers)
        if await _tolerant(services, record.sandbox_id, removal):
            if containers:
                sandbox.record = replace(sandbox.record, workload_id="", supervisor_id="")
                await services.save_quietly(sandbox)
            sandbox.cleared = files_gone
        return
    try:
        sandbox.workload = await services.engine.inspect_container(record.workload_id)
    except EngineUnreachableError:
        raise
    except EngineAbsentError:
        services.log_of(sandbox).warning("workload container is gone")
    except EngineError as error:
        # Of this one nothing is known yet; the first look asks again.
        services.log_of(sandbox).warning("workload container could not be looked at", error=error.message)
    await _miss_supervisor(services, sandbox)
    sandbox.secrets = await services.disk.run(lambda: _secrets(services, record.sandbox_id))
    services.log_of(sandbox).info("sandbox adopted", phase=record.phase.value)


async def _miss_supervisor(services: Services, sandbox: Sandbox) -> None:
    """Have a supervisor made again that is nowhere to be found beside a running workload."""
    record, workload = sandbox.record, sandbox.workload
    if record.phase is not RecordPhase.ACTIVE or record.failure is not None:
        return
    if workload is None or not workload.status.is_alive:
        return
    if record.supervisor_id:
        try:
            supervisor = await services.engine.inspect_container(record.supervisor_id)
        except EngineUnreachableError:
            raise
        except EngineAbsentError:
            services.log_of(sandbox).warning("supervisor is gone; it is made again")
        except EngineError as error:
            services.log_of(sandbox).warning("supervisor could not be looked at", error=error.message)
            return
        else:
            sandbox.note_supervisor(paused=supervisor.status is ContainerStatus.PAUSED)
            return  # running, or ended with evidence of why
    sandbox.record = record.changed(now(), phase=RecordPhase.STARTING, supervisor_id="")
    await services.save_quietly(sandbox)


def _secrets(services: Services, sandbox_id: str) -> tuple[str, ...]:
    """What a running supervisor was given, so that its log's end can be quoted without it."""
    found: list[str] = []
    with contextlib.suppress(DriverError, DocumentError):
        data = services.store.read_file(sandbox_id, AUTH_FILE)
        found += log_secrets.of_bundle(AuthBundle.from_json(data)) if data is not None else ()
    with contextlib.suppress(DriverError):
        found += log_secrets.of_proxy_credentials(read_proxy_auth(services.config))
    return tuple(found)
