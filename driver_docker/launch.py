"""Carrying a launch out: from an accepted request to two running containers, or to a reason why not.

The order is that of compute-driver contract 5.4, with what does not depend on each other side by side: both containers
are created, staged and described at the same time; the workload starts first, the supervisor second.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from driver_docker import documents, events, names, records, staging
from driver_docker.accounts import AccountsReader
from driver_docker.concurrency import together
from driver_docker.creation import Creator
from driver_docker.delivery import Delivery
from driver_docker.engine import EngineError, EngineUnreachableError
from driver_docker.errors import ProvisioningError
from driver_docker.health import wait_until_healthy
from driver_docker.identity import Accounts, resolve, select
from driver_docker.images import Images
from driver_docker.labels import Role, container_labels
from driver_docker.launch_steps import during
from driver_docker.mounts import selinux_hint
from driver_docker.plan import NETWORK_NONE, LaunchPlan, plan_launch
from driver_docker.postmortem import Exit, examine
from driver_docker.registry_credentials import RegistryLogins
from driver_docker.resources import Resources
from driver_docker.retained import RetainedLaunch, committed_files
from driver_docker.runtime_volume import RuntimeVolumes
from driver_docker.services import now
from driver_docker.verdict import Reason
from driver_docker.workers import WorkerPool
from openshell.isolation.documents import DocumentError
from openshell.isolation.tls import issue_session_tls
from openshell.status import StatusCode
from openshell.verdicts import Component

if TYPE_CHECKING:
    from driver_docker.documents import LaunchDocuments
    from driver_docker.engine_objects import ContainerFacts, ImageFacts
    from driver_docker.isolation_backends import Delegation
    from driver_docker.requests import LaunchRequest
    from driver_docker.sandboxes import Sandbox
    from driver_docker.services import Services
    from openshell.isolation.documents import LaunchAuthentication, WorkloadIdentity
    from openshell.isolation.tls import SessionTls

_LATE_WORDS_SECONDS = 1.0
_START_REASONS = {
    Component.WORKLOAD: Reason.CONTAINER_START_FAILED,
    Component.SUPERVISOR: Reason.CONTROL_SUPERVISOR_START_FAILED,
}
_SELINUX_LABEL_MISSING = "SelinuxLabelMissing"


class ExitBeforeReadyError(ProvisioningError):
    """A container ended before the sandbox became ready; `exit` says why."""

    default_status = StatusCode.UNAVAILABLE

    def __init__(self, ended: Exit) -> None:
        super().__init__(ended.verdict.message, reason=ended.verdict.reason)
        self.exit = ended


@dataclass(frozen=True, slots=True, kw_only=True)
class _Components:
    """What is launched beside the workload's own image."""

    supervisor: ImageFacts
    runtime: ImageFacts
    runtime_volume: str


class Launcher:
    """Launches sandboxes, a few at a time."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._engine = services.engine
        self._config = services.config
        self.images = Images(services.engine, services.config.image_pull_policy, RegistryLogins.of(os.environ))
        self.runtime_volumes = RuntimeVolumes(services.engine, services.owner)
        self.resources = Resources(services.engine, services.config)
        self.creator = Creator(services.engine, services.owner)
        self.delivery = Delivery(services, self.creator)
        self._accounts = AccountsReader(services.engine)
        self.slots = services.metrics.slots(services.config.start_concurrency)
        self._crypto = WorkerPool("certificates", max_threads=1)

    def close(self) -> None:
        """Let the own thread end."""
        self._crypto.close()

    async def launch(self, sandbox: Sandbox, request: LaunchRequest, launch: LaunchAuthentication) -> None:
        """Bring a reserved sandbox to ready.

        Args:
            sandbox: The reserved entry.
            request: The checked request.
            launch: The gateway's credentials for it.

        Raises:
            ProvisioningError: With the condition's reason; what was made is still there for the caller to remove. An
                `IncompatibleError` is one of them.
            EngineUnreachableError: The engine cannot be asked.
        """
        begun = time.monotonic()
        image, components, tls = await together(
            self._workload_image(sandbox, request.image), self._components(), self.session_tls(launch)
        )
        sandbox.record = replace(
            sandbox.record,
            runtime_image_id=components.runtime.image_id,
            runtime_image_reference=self._config.sandbox_runtime_image,
        )
        identity = await self._identity(sandbox, request, image)
        async with self.slots:
            plan = plan_launch(
                request,
                config=self._config,
                owner=self._services.owner,
                image=image,
                identity=identity,
                supervisor_image_id=components.supervisor.image_id,
                runtime_volume=components.runtime_volume,
                resources=await self.resources.claim(request),
            )
            facts = await self._create(sandbox, request, plan, launch)
            if hint := selinux_hint(request.mounts, selinux=self._engine.info.selinux):
                self._services.publish(
                    events.warning(sandbox.sandbox_id, now(), reason=_SELINUX_LABEL_MISSING, message=hint)
                )
            built = self._documents(request, launch, plan, tls, facts, await self.delivery.delegation())
            await self._run(sandbox, request, plan, built)
        self._services.log_of(sandbox).info("containers running", milliseconds=_since(begun))
        with during(Reason.CONTROL_SUPERVISOR_START_FAILED):
            if not await wait_until_healthy(self._engine, sandbox, image=components.supervisor):
                raise ExitBeforeReadyError(await self.why_ended(sandbox))
        self._services.log_of(sandbox).info("sandbox ready", milliseconds=_since(begun))

    async def _workload_image(self, sandbox: Sandbox, reference: str) -> ImageFacts:
        sandbox_id, publish = sandbox.sandbox_id, self._services.publish
        with during(Reason.IMAGE_PULL_FAILED):
            found = await self.images.find(
                reference,
                on_pull=lambda: publish(events.pulling(sandbox_id, now(), image=reference)),
                on_progress=lambda step: publish(
                    events.pulling_layer(sandbox_id, now(), image=reference, progress=step)
                ),
            )
        told = events.pulled if found.pulled else events.image_present
        publish(told(sandbox_id, now(), image=reference))
        return found.facts

    async def _components(self) -> _Components:
        """The supervisor's and the runtime's images, judged as they are now that they are here."""
        reference = self._config.sandbox_runtime_image
        with during(Reason.IMAGE_PULL_FAILED):
            supervisor, runtime = await together(
                self.images.find_component(self._config.supervisor_image), self.images.find_component(reference)
            )
        self._services.gate.admit_images(supervisor=supervisor.facts, runtime=runtime.facts)
        with during(Reason.BOUNDARY_CHANNEL_CREATE_FAILED):
            volume = await self.runtime_volumes.ensure(runtime.facts, reference=reference)
        return _Components(supervisor=supervisor.facts, runtime=runtime.facts, runtime_volume=volume)

    async def session_tls(self, launch: LaunchAuthentication) -> SessionTls:
        """New TLS material for a launch's session."""
        return await self._crypto.run(lambda: issue_session_tls(launch.supervisor.session_id))

    async def _identity(self, sandbox: Sandbox, request: LaunchRequest, image: ImageFacts) -> WorkloadIdentity:
        selectors = select(user=request.user, group=request.group, image_user=image.user)
        accounts = Accounts()
        if selectors.needs_accounts:
            labels = container_labels(
                self._services.owner,
                role=Role.IDENTITY,
                sandbox_id=request.sandbox_id,
                name=request.name,
                workspace=request.workspace,
            )
            container = names.identity_container_name(sandbox.record.container_name)
            with during(Reason.IDENTITY_RESOLUTION_FAILED):
                accounts = await self._accounts.read(image.image_id, container_name=container, labels=labels)
        return resolve(selectors, accounts, resource_digest=image.image_id)

    async def _create(
        self, sandbox: Sandbox, request: LaunchRequest, plan: LaunchPlan, launch: LaunchAuthentication
    ) -> ContainerFacts:
        """Volumes, then both containers; the workload's fence is checked before anything secret goes near it."""
        await together(
            self.creator.create_volume(plan.channel_volume), self.creator.create_volume(plan.supervisor_volume)
        )
        # The files are for a later start, so nothing waits for the disk here that does not wait for the engine anyway.
        workload_id, supervisor_id, _ = await together(
            self.creator.create_container(plan.workload),
            self.creator.create_container(plan.supervisor),
            self._services.save_files(sandbox, _retained(request, plan).to_files()),
        )
        sandbox.record = replace(
            sandbox.record,
            workload_id=workload_id,
            supervisor_id=supervisor_id,
            supervisor_epoch=launch.supervisor.auth_epoch,
            image_id=plan.workload.image,
        )
        refused = "the created workload container could not be inspected"
        with during(Reason.OUTER_FENCE_INSPECT_FAILED, refused=refused):
            facts = await self._engine.inspect_container(workload_id)
        with during(Reason.OUTER_FENCE_INSPECT_FAILED):
            check_fence(facts)
            await self.resources.recheck(facts, workspace=plan.workspace_root)
        sandbox.workload = facts
        self._services.publish(events.created(sandbox.sandbox_id, now(), container_name=plan.workload.name))
        return facts

    def _documents(
        self,
        request: LaunchRequest,
        launch: LaunchAuthentication,
        plan: LaunchPlan,
        tls: SessionTls,
        facts: ContainerFacts,
        delegation: Delegation | None,
    ) -> LaunchDocuments:
        try:
            return documents.build_documents(
                sandbox_id=request.sandbox_id,
                launch=launch,
                tls=tls,
                identity=plan.identity,
                workload=facts,
                child_environment=request.child_environment,
                host_gateway_ip=self._config.host_gateway_ip,
                gpus_attached=bool(plan.workload.cdi_devices),
                delegation=delegation,
            )
        except DocumentError as error:
            raise ProvisioningError(
                f"the boundary's documents could not be written: {error.message}",
                reason=Reason.BOUNDARY_CONFIG_WRITE_FAILED,
            ) from None

    async def _run(self, sandbox: Sandbox, request: LaunchRequest, plan: LaunchPlan, built: LaunchDocuments) -> None:
        """Stage both containers side by side; the workload starts as soon as it has its files, the supervisor last."""
        supervisor = await self.delivery.supervisor_entries(sandbox, built)
        await together(
            self._stage_and_start_workload(sandbox, plan, built),
            self.delivery.stage_supervisor(plan.supervisor, sandbox.record.supervisor_id, supervisor),
        )
        await self.start(sandbox, Component.SUPERVISOR, sandbox.record.supervisor_id)

    async def _stage_and_start_workload(self, sandbox: Sandbox, plan: LaunchPlan, built: LaunchDocuments) -> None:
        """The records are written meanwhile; both containers are in them before either starts."""
        entries = staging.workload_entries(built, plan.identity, workspace_root=plan.workspace_root)
        workload = sandbox.record.workload_id
        await together(
            self.delivery.put(workload, staging.WORKLOAD_ARCHIVE_ROOT, staging.build_tar(entries)),
            self._services.save(sandbox),
        )
        await together(self.start(sandbox, Component.WORKLOAD, workload), self._commit(sandbox, built))

    async def _commit(self, sandbox: Sandbox, built: LaunchDocuments) -> None:
        with during(Reason.BOUNDARY_CONFIG_WRITE_FAILED):
            await self._services.commit_files(sandbox, committed_files(built), last=records.AUTH_FILE)

    async def start(self, sandbox: Sandbox, component: Component, container: str) -> None:
        """Start a container of a sandbox.

        Raises:
            ExitBeforeReadyError: The engine refused; it says why.
            EngineUnreachableError: The engine cannot be asked.
        """
        reason = _START_REASONS[component]
        try:
            with during(reason):
                await self._engine.start_container(container)
        except EngineUnreachableError:
            raise
        except EngineError as error:
            ended = await examine(self._services, sandbox, component, start_error=error)
            raise ExitBeforeReadyError(ended) from error

    async def why_ended(self, sandbox: Sandbox) -> Exit:
        """Which of the two containers to blame: the supervisor where it said why, else the one that ended first.

        Raises:
            EngineUnreachableError: The engine does not say.
        """
        record = sandbox.record
        workload_ended = sandbox.has_event(record.workload_id, "die", "destroy")
        if workload_ended and not sandbox.has_event(record.supervisor_id, "die", "destroy"):
            await self._supervisor_follows(sandbox)
        supervisor = await examine(self._services, sandbox, Component.SUPERVISOR)
        if supervisor.verdict.is_exit and (supervisor.has_words or not workload_ended):
            return supervisor
        workload = await examine(self._services, sandbox, Component.WORKLOAD)
        ended = next((each for each in (workload, supervisor) if each.verdict.is_exit), None)
        if ended is None:
            raise EngineUnreachableError(
                f"why sandbox {sandbox.sandbox_id} ended is not known: {supervisor.verdict.message}"
            )
        return ended

    async def _supervisor_follows(self, sandbox: Sandbox) -> None:
        """Give a supervisor that lost its workload a moment to say why."""
        try:
            async with asyncio.timeout(_LATE_WORDS_SECONDS):
                while not sandbox.has_event(sandbox.record.supervisor_id, "die", "destroy"):
                    await sandbox.moved.wait()
        except TimeoutError:
            return


def _retained(request: LaunchRequest, plan: LaunchPlan) -> RetainedLaunch:
    return RetainedLaunch(
        main_process=request.main_process,
        workspace_root=plan.workspace_root,
        identity=plan.identity,
        log_level=request.log_level,
        gpus_attached=bool(plan.workload.cdi_devices),
        child_environment=request.child_environment,
    )


def check_fence(facts: ContainerFacts) -> None:
    """Check that a workload container has no network, before anything secret goes near it and before each start.

    Raises:
        ProvisioningError: It has one.
    """
    unexpected = documents.unexpected_networks(facts)
    if facts.network_mode != NETWORK_NONE or unexpected:
        raise ProvisioningError(
            f"the workload container has network mode {facts.network_mode} and networks "
            f"{', '.join(unexpected) or 'none'}; it must have none at all",
            reason=Reason.OUTER_FENCE_REJECTED,
        )


def _since(begun: float) -> int:
    return round((time.monotonic() - begun) * 1000)
