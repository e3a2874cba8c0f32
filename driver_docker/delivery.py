"""Bringing files into created containers: a launch's documents, and the operator's files for the supervisor."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from driver_docker import log_secrets, staging
from driver_docker.config import Staging
from driver_docker.engine import EngineError
from driver_docker.launch_steps import during
from driver_docker.plan import plan_staging
from driver_docker.supervisor_files import read_delegation, read_supervisor_files
from driver_docker.verdict import Reason

if TYPE_CHECKING:
    from driver_docker.creation import Creator
    from driver_docker.documents import LaunchDocuments
    from driver_docker.engine_objects import ContainerSpec
    from driver_docker.isolation_backends import Delegation
    from driver_docker.sandboxes import Sandbox
    from driver_docker.services import Services


class Delivery:
    """Delivers the files of launches and starts."""

    def __init__(self, services: Services, creator: Creator) -> None:
        self._services = services
        self._engine = services.engine
        self._config = services.config
        self._creator = creator

    async def delegation(self) -> Delegation | None:
        """What the supervisor is told about a backend that is not the built-in one; read anew for each launch.

        Raises:
            SupervisorFileError: The backend's trust anchor cannot be used.
        """
        return await self._services.disk.run(lambda: read_delegation(self._config))

    async def supervisor_entries(self, sandbox: Sandbox, built: LaunchDocuments) -> tuple[staging.StagedEntry, ...]:
        """What is staged for a supervisor: its documents, and the operator's files as they are now.

        What of these is secret is from now on among the sandbox's.

        Raises:
            SupervisorFileError: A file that the configuration names cannot be used.
        """
        files = await self._services.disk.run(lambda: read_supervisor_files(self._config))
        proxy_secrets = log_secrets.of_proxy_credentials(files.proxy_auth)
        sandbox.secrets = tuple(dict.fromkeys((*sandbox.secrets, *proxy_secrets)))
        return staging.supervisor_entries(
            built,
            gateway_ca=files.gateway_ca,
            proxy_auth=files.proxy_auth,
            proxy_ca_bundle=files.proxy_ca_bundle,
            layout=self._config.staging,
        )

    async def stage_supervisor(
        self, spec: ContainerSpec, supervisor_id: str, entries: tuple[staging.StagedEntry, ...]
    ) -> None:
        """Bring a created supervisor's files into its volume, as the configured staging has it.

        Args:
            spec: What the supervisor container was made of.
            supervisor_id: The created container.
            entries: Its files.

        Raises:
            ProvisioningError: The engine refused.
            EngineUnreachableError: The engine cannot be asked.
        """
        tar = staging.build_tar(entries)
        if self._config.staging is not Staging.UPSTREAM:
            await self.put(supervisor_id, staging.SUPERVISOR_ARCHIVE_ROOT, tar)
            return
        helper = plan_staging(spec)
        try:
            await self.put(await self._creator.create_container(helper), staging.SUPERVISOR_ARCHIVE_ROOT, tar)
        finally:
            # By name: a cancelled create has been carried out, but its answer is lost. What stays after a failure here
            # carries the sandbox's id, and goes with it.
            with contextlib.suppress(EngineError):
                await self._engine.remove_container(helper.name)

    async def put(self, container: str, path: str, tar: bytes) -> None:
        """Unpack an archive in a container.

        Raises:
            ProvisioningError: The engine refused.
            EngineUnreachableError: The engine cannot be asked.
        """
        refused = f"files could not be staged into container {container[:12]}"
        with during(Reason.BOUNDARY_CONFIG_WRITE_FAILED, refused=refused):
            await self._engine.put_archive(container, path, tar)
