"""Creating what a launch consists of in the engine: its volumes and containers, where their names are free."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from driver_docker.engine import EngineAbsentError, EngineConflictError
from driver_docker.errors import ProvisioningError
from driver_docker.labels import is_owned
from driver_docker.launch_steps import during
from driver_docker.teardown import remove_container
from driver_docker.verdict import Reason

if TYPE_CHECKING:
    from driver_docker.engine import Engine
    from driver_docker.engine_objects import ContainerSpec, VolumeSpec
    from driver_docker.labels import Owner

_NAME_ATTEMPTS: Final = 20
_NAME_PAUSE_SECONDS: Final = 0.05


class Creator:
    """Creates volumes and containers of one driver."""

    def __init__(self, engine: Engine, owner: Owner) -> None:
        self._engine = engine
        self._owner = owner

    async def create_volume(self, spec: VolumeSpec) -> None:
        """Create a volume, or take the one of an earlier attempt.

        Raises:
            ProvisioningError: The engine refused, or the name is taken by somebody else's volume.
            EngineUnreachableError: The engine cannot be asked.
        """
        with during(Reason.BOUNDARY_CHANNEL_CREATE_FAILED, refused=f"volume {spec.name} could not be created"):
            facts = await self._engine.create_volume(spec)
        if facts.driver != "local" or facts.options or dict(facts.labels) != dict(spec.labels):
            raise ProvisioningError(
                f"volume {spec.name} exists but was not made by this driver; remove it first",
                reason=Reason.BOUNDARY_CHANNEL_CREATE_FAILED,
            )

    async def create_container(self, spec: ContainerSpec) -> str:
        """Create a container; one of this driver that has its name is a leftover, and makes way.

        Raises:
            ProvisioningError: The engine refused, or the name is taken by somebody else's container.
            EngineUnreachableError: The engine cannot be asked.
        """
        with during(Reason.CONTAINER_CREATE_FAILED, refused=f"container {spec.name} could not be created"):
            for _ in range(_NAME_ATTEMPTS):
                try:
                    return await self._engine.create_container(spec)
                except EngineConflictError:
                    # The name is taken. A leftover of this driver with the same sandbox id is in nobody's use, and
                    # engines let go of a name a moment after its container. Anything else is not ours to remove.
                    if not await self._remove_leftover(spec):
                        raise
                    await asyncio.sleep(_NAME_PAUSE_SECONDS)
            return await self._engine.create_container(spec)

    async def _remove_leftover(self, spec: ContainerSpec) -> bool:
        """Whether the name is or will be free: its container was this driver's own, or is gone already."""
        try:
            facts = await self._engine.inspect_container(spec.name)
        except EngineAbsentError:
            return True
        if not is_owned(facts.labels, self._owner):
            return False
        await remove_container(self._engine, facts.container_id)
        return True
