"""Carrying a start out: a retained workload and a new supervisor, made to run from a committed launch input.

Everything here may be done again after any interruption. A workload that runs was started from the committed input, and
is left alone; what is not there yet is made.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from driver_docker import documents, names, records, staging
from driver_docker.engine import EngineAbsentError
from driver_docker.errors import ProvisioningError
from driver_docker.health import wait_until_healthy
from driver_docker.launch import ExitBeforeReadyError, check_fence
from driver_docker.launch_steps import during
from driver_docker.plan import plan_supervisor
from driver_docker.retained import CommittedLaunch, RetainedLaunch, committed_files
from driver_docker.teardown import remove_container
from driver_docker.verdict import Reason
from openshell.isolation.documents import DocumentError
from openshell.verdicts import Component

if TYPE_CHECKING:
    from driver_docker.engine_objects import ContainerFacts, ContainerSpec
    from driver_docker.launch import Launcher
    from driver_docker.sandboxes import Sandbox
    from driver_docker.services import Services
    from openshell.isolation.documents import LaunchAuthentication


class Relauncher:
    """Starts retained sandboxes again."""

    def __init__(self, services: Services, launcher: Launcher) -> None:
        self._services = services
        self._engine = services.engine
        self._launcher = launcher

    async def read_committed(self, sandbox: Sandbox) -> CommittedLaunch:
        """The launch input of the last launch or start.

        Raises:
            PreconditionError: There is none that is whole.
        """
        return await self._services.disk.run(lambda: CommittedLaunch.read(self._services.store, sandbox.sandbox_id))

    async def read_retained(self, sandbox: Sandbox) -> RetainedLaunch:
        """What the create decided.

        Raises:
            PreconditionError: It is missing or damaged.
        """
        return await self._services.disk.run(lambda: RetainedLaunch.read(self._services.store, sandbox.sandbox_id))

    async def rotate(self, sandbox: Sandbox, launch: LaunchAuthentication, facts: ContainerFacts) -> None:
        """Commit a new launch input for a workload that does not run: TLS, bootstrap, descriptor and credentials.

        Raises:
            PreconditionError: What the create decided is missing.
            ProvisioningError: The documents cannot be written.
            RecordError: The disk refused.
        """
        retained = await self.read_retained(sandbox)
        tls = await self._launcher.session_tls(launch)
        try:
            built = documents.build_documents(
                sandbox_id=sandbox.sandbox_id,
                launch=launch,
                tls=tls,
                identity=retained.identity,
                workload=facts,
                child_environment=retained.child_environment,
                host_gateway_ip=self._services.config.host_gateway_ip,
                gpus_attached=retained.gpus_attached,
            )
        except DocumentError as error:
            raise ProvisioningError(
                f"the boundary's documents could not be written: {error.message}",
                reason=Reason.BOUNDARY_CONFIG_WRITE_FAILED,
            ) from None
        await self._services.commit_files(sandbox, committed_files(built), last=records.AUTH_FILE)

    async def refresh_credentials(self, sandbox: Sandbox, launch: LaunchAuthentication) -> None:
        """Commit new credentials for a workload that runs on; the rest of its launch input stays.

        Raises:
            RecordError: The disk refused.
        """
        await self._services.save_files(sandbox, {records.AUTH_FILE: launch.supervisor_json})

    async def run(self, sandbox: Sandbox) -> None:
        """Make both containers run from the committed launch input, and wait until the supervisor is healthy.

        Raises:
            ExitBeforeReadyError: One of them ended before.
            ProvisioningError: With the condition's reason.
            PreconditionError: The launch input is not whole, or the revisions no longer fit.
            EngineUnreachableError: The engine cannot be asked; the same call may be repeated.
            EngineError: The workload container is gone.
        """
        begun = time.monotonic()
        services, launcher = self._services, self._launcher
        with during(Reason.CONTROL_SUPERVISOR_EXITED):
            committed = await self.read_committed(sandbox)
            retained = await self.read_retained(sandbox)
        sandbox.secrets = committed.secrets
        delegation = await launcher.delivery.delegation()
        built = documents.with_delegation(committed.documents, delegation)
        image = (await launcher.images.find_component(services.config.supervisor_image)).facts
        await services.gate.admit_again(sandbox.record)  # with the image that may just have been pulled
        owner = services.owner
        supervisor = plan_supervisor(
            retained.as_request(sandbox.record),
            config=services.config,
            owner=owner,
            workload_name=sandbox.record.container_name,
            image_id=image.image_id,
            root=retained.workspace_root,
            channel_volume=names.channel_volume_name(namespace=owner.namespace, sandbox_id=sandbox.sandbox_id),
            supervisor_volume=names.supervisor_volume_name(namespace=owner.namespace, sandbox_id=sandbox.sandbox_id),
        )
        async with launcher.slots:
            await self._remove_supervisor(sandbox)
            await self._run_workload(sandbox, retained, committed)
            entries = await launcher.delivery.supervisor_entries(sandbox, built)
            await self._run_supervisor(sandbox, supervisor, entries, epoch=committed.auth.auth_epoch)
        services.log_of(sandbox).info("containers running again", milliseconds=_since(begun))
        if not await wait_until_healthy(self._engine, sandbox, image=image):
            raise ExitBeforeReadyError(await launcher.why_ended(sandbox))

    async def _remove_supervisor(self, sandbox: Sandbox) -> None:
        old = sandbox.record.supervisor_id
        if old:
            sandbox.intentional.add(old)
            sandbox.record = replace(sandbox.record, supervisor_id="")
            await remove_container(self._engine, old)
            sandbox.forget(old)

    async def _run_workload(self, sandbox: Sandbox, retained: RetainedLaunch, committed: CommittedLaunch) -> None:
        workload = sandbox.record.workload_id
        facts = await self._engine.inspect_container(workload)
        sandbox.workload = facts
        if facts.status.is_alive:
            return
        check_fence(facts)
        await self._launcher.resources.recheck(facts, workspace=retained.workspace_root)
        entries = staging.workload_entries(
            committed.documents,
            retained.identity,
            # Once it has run, the folder is the user's: neither its owner nor its mode is touched again.
            workspace_root=retained.workspace_root if facts.started_at is None else "",
        )
        await self._launcher.delivery.put(workload, staging.WORKLOAD_ARCHIVE_ROOT, staging.build_tar(entries))
        sandbox.begin_run(workload, stream=self._services.event_stream)
        sandbox.record = replace(
            sandbox.record, generation=committed.generation, fenced_finished_at=facts.finished_at, was_ready=False
        )
        await self._services.save(sandbox)
        await self._launcher.start(sandbox, Component.WORKLOAD, workload)

    async def _run_supervisor(
        self, sandbox: Sandbox, spec: ContainerSpec, entries: tuple[staging.StagedEntry, ...], *, epoch: int
    ) -> None:
        supervisor = await self._launcher.creator.create_container(spec)
        sandbox.record = replace(sandbox.record, supervisor_id=supervisor, supervisor_epoch=epoch)
        await self._services.save(sandbox)
        await self._launcher.delivery.stage_supervisor(spec, supervisor, entries)
        await self._launcher.start(sandbox, Component.SUPERVISOR, supervisor)

    async def look_at_workload(self, sandbox: Sandbox) -> ContainerFacts | None:
        """The workload container as it is now; `None` when it is gone.

        Raises:
            EngineUnreachableError: The engine cannot be asked.
        """
        try:
            return await self._engine.inspect_container(sandbox.record.workload_id)
        except EngineAbsentError:
            return None


def _since(begun: float) -> int:
    return round((time.monotonic() - begun) * 1000)
