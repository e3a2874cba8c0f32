"""What a launch takes of the engine beyond its own containers: the caller's mounts, admitted volumes, and GPUs.

Checked when a sandbox is validated and created, claimed right before its container is created, and checked again before
every start.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from driver_docker import mounts
from driver_docker.config import PullPolicy
from driver_docker.engine import EngineAbsentError, EngineRefusedError
from driver_docker.engine_address import engine_is_local
from driver_docker.errors import PreconditionError
from driver_docker.gpu import GpuSelector
from driver_docker.image_reference import parse_reference
from driver_docker.mounts import BindRequest
from driver_docker.plan import RUNTIME_DIR, SUPERVISOR_CA_DIR, ClaimedResources
from driver_docker.volume_admission import VolumeAdmission, encode_identities
from driver_docker.workers import run_aside
from driver_docker.workspace import CHANNEL_DIR, workspace_root

if TYPE_CHECKING:
    from driver_docker.config import DriverConfig
    from driver_docker.engine import Engine
    from driver_docker.engine_objects import ContainerFacts
    from driver_docker.requests import LaunchRequest


class Resources:
    """Mounts, volumes and GPUs of this driver's sandboxes."""

    def __init__(self, engine: Engine, config: DriverConfig) -> None:
        self._engine = engine
        self._config = config
        self._admission = VolumeAdmission(engine, config)
        self._gpus = GpuSelector()

    async def check(self, request: LaunchRequest) -> None:
        """Refuse what a launch would refuse, without side effects (compute-driver contract 5.4, steps 1, 3 and 4).

        Raises:
            PreconditionError: A limit, a kind of mount, a host path or a GPU is not offered.
            AdmissionDeniedError: A volume may not be mounted.
            AdmissionLookupError: A volume's labels could not be read.
            MountError: A mount covers the workspace of an image that is here already.
            EngineUnreachableError: The engine cannot be asked.
        """
        self._check_limits(request)
        await self._check_mounts(request)
        await self._admission.admit(request.mounts, workspace=request.workspace)
        if request.mounts:
            await self._check_workspace(request)
        if request.gpu is not None:
            self._gpus.peek(request.gpu, await self._engine.refresh_info())

    async def claim(self, request: LaunchRequest) -> ClaimedResources:
        """Decide again, and choose devices: the last thing before the workload container is created.

        Raises:
            PreconditionError: As `check`.
            AdmissionDeniedError: As `check`.
            AdmissionLookupError: As `check`.
        """
        await self._check_mounts(request)
        identities = await self._admission.admit(request.mounts, workspace=request.workspace)
        devices: tuple[str, ...] = ()
        if request.gpu is not None:
            devices = self._gpus.take(request.gpu, await self._engine.refresh_info())
        return ClaimedResources(cdi_devices=devices, volume_identities_json=encode_identities(identities))

    async def recheck(self, facts: ContainerFacts, *, workspace: str) -> None:
        """Decide again about a workload container that exists; to be called before each of its starts.

        Args:
            facts: A fresh inspect of it.
            workspace: Its workspace.

        Raises:
            AdmissionDeniedError: It must not be started.
            AdmissionLookupError: A volume's labels could not be read; the start may be tried again.
            MountError: A symbolic link would bring a mount to a place where none may be.
            EngineError: The engine failed.
        """
        await self._admission.recheck(facts)
        await self._check_links(facts, workspace)

    async def _check_links(self, facts: ContainerFacts, workspace: str) -> None:
        """Follow the symbolic links below a container's mounts, since the engine follows them when it mounts.

        What was checked as text may lie elsewhere by an image's link, or by one that the agent made in an earlier run.
        """
        every = [*(mount.target for mount in facts.mounts), *facts.tmpfs_targets]
        foreign = [target for target in every if target not in {RUNTIME_DIR, CHANNEL_DIR, SUPERVISOR_CA_DIR}]
        if not foreign:
            return
        known: dict[str, str | None] = {}
        for own in (RUNTIME_DIR, CHANNEL_DIR, SUPERVISOR_CA_DIR):
            resolved = await self._resolved(facts.container_id, own, known)
            if resolved != own:
                raise mounts.MountError(
                    f"a symbolic link in the container leads {own} to {resolved}; with that it takes no mounts"
                )
        root = await self._resolved(facts.container_id, workspace, known)
        for target in foreign:
            try:
                resolved = await self._resolved(facts.container_id, target, known)
            except EngineRefusedError as error:
                raise mounts.MountError(
                    f"mount target {target} cannot be looked at in the container, which is so below a file: "
                    f"{error.message}"
                ) from error
            mounts.check_resolved(target, resolved, workspace=root)

    async def _resolved(self, container: str, path: str, known: dict[str, str | None]) -> str:
        """Where a path lies once links are followed; what does not exist cannot be a link."""
        resolved = ""
        parts = path.strip("/").split("/")
        for index, part in enumerate(parts):
            place = f"{resolved}/{part}"
            if place not in known:
                try:
                    known[place] = await self._engine.link_target(container, place)
                except EngineAbsentError:
                    return "/".join([resolved, *parts[index:]])
            resolved = (known[place] or place).rstrip("/")
        return resolved or "/"

    def _check_limits(self, request: LaunchRequest) -> None:
        """Refuse limits that the engine would accept and drop."""
        engine, limits = self._engine.info, request.limits
        for wanted, enforced, what in (
            (limits.nano_cpus is not None, engine.cpu_limits, "resources.cpu_limit"),
            (limits.memory_bytes is not None, engine.memory_limits, "resources.memory_limit"),
            (True, engine.pids_limits, "the limit of processes that every sandbox has"),
        ):
            if wanted and not enforced:
                raise PreconditionError(
                    f"{what} cannot be enforced: the engine's kernel lacks the control group for it; enable it there "
                    "(see the warnings of 'docker info')"
                )
        if limits.nano_cpus is not None and engine.cpus and limits.nano_cpus > engine.cpus * 10**9:
            raise PreconditionError(
                f"resources.cpu_limit is above the {engine.cpus} CPUs that the engine's host has; ask for fewer"
            )

    async def _check_mounts(self, request: LaunchRequest) -> None:
        config = self._config
        mounts.check_offered(
            request.mounts,
            enable_bind_mounts=config.enable_bind_mounts,
            admission_enabled=config.resource_admission.enabled,
            api=self._engine.info.api,
        )
        sources = [mount.source for mount in request.mounts if isinstance(mount, BindRequest)]
        missing = await run_aside("bind sources", lambda: _missing(sources, config)) if sources else None
        if missing is not None:
            # The engine would make an empty folder there, owned by root.
            raise PreconditionError(
                f"bind mount source {missing} does not exist, or the driver cannot see it; create it first"
            )

    async def _check_workspace(self, request: LaunchRequest) -> None:
        reference = parse_reference(request.image)
        if self._config.image_pull_policy is PullPolicy.ALWAYS and not reference.is_id:
            return  # the copy that is here is not the one that a launch will use
        try:
            image = await self._engine.inspect_image(reference.local)
        except EngineAbsentError:
            return  # not pulled yet: the launch will tell
        root = workspace_root(image.working_dir, image_volumes=image.volumes)
        mounts.check_against_workspace(request.mounts, root)


def _missing(paths: list[str], config: DriverConfig) -> str | None:
    if not engine_is_local(config):
        return None
    return next((path for path in paths if not os.path.exists(path)), None)  # noqa: PTH110 - unlike Path's, it never raises
