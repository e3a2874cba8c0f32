"""The gate that every launch passes before anything is created for it: revisions that fit, and the admitted backend.

`admit_new` guards Validate and Create, `admit_again` a start and every other re-creation of a supervisor, and
`admit_images` looks once more at the very images that a launch has pinned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import structlog

from driver_docker.compatibility import CompatibilityMode, Finding, IncompatibleError, Outcome, judge
from driver_docker.concurrency import together
from driver_docker.engine import EngineAbsentError
from driver_docker.engine_address import engine_is_local
from driver_docker.image_reference import parse_reference
from driver_docker.isolation_backends import check_pin, check_placeable
from driver_docker.revisions import Component, gateway_revision, image_revision

if TYPE_CHECKING:
    from driver_docker.config import DriverConfig
    from driver_docker.engine import Engine
    from driver_docker.engine_objects import ImageFacts
    from driver_docker.handshake import Handshake
    from driver_docker.revisions import Revision
    from driver_docker.sandbox_record import SandboxRecord

_MAX_REMEMBERED: Final = 64
_KEPT: Final = "kept since the sandbox was created"


class LaunchGate:
    """Lets a launch pass or refuses it. Has no effect on the engine."""

    def __init__(self, engine: Engine, config: DriverConfig, handshake: Handshake) -> None:
        self._engine = engine
        self._config = config
        self._handshake = handshake
        self._told: set[str] = set()
        self._log = structlog.get_logger("compatibility")

    async def admit_new(self) -> None:
        """Let a new sandbox pass, by the images as they are on the engine now.

        An image that is not here yet does not hold a launch up: `admit_images` follows once it is pulled.

        Raises:
            PreconditionError: The selected backend cannot be placed.
            IncompatibleError: The revisions are no supported triplet.
            EngineUnreachableError: The engine cannot be asked.
        """
        await self._admit(runtime=self._config.sandbox_runtime_image)

    async def admit_again(self, record: SandboxRecord) -> None:
        """Let a retained sandbox pass: call this first in a start and in every other re-creation of a supervisor.

        The supervisor is judged by the image that is configured now, because a new container is made of it; the
        runtime by the image that the sandbox was created with, because its workload container keeps that. Nothing may
        be stopped, created or rotated before this returns; after a refusal the sandbox stays as it is.

        Raises:
            PreconditionError: The driver's backend is another than the one the sandbox was admitted with, or cannot be
                placed any more.
            IncompatibleError: The revisions are no supported triplet.
            EngineUnreachableError: The engine cannot be asked.
        """
        check_pin(record, self._config.backend_name)
        kept = record.runtime_image_id
        await self._admit(
            runtime=kept or self._config.sandbox_runtime_image,
            named=record.runtime_image_reference,
            note=_KEPT if kept else "",
        )

    def admit_images(self, *, supervisor: ImageFacts, runtime: ImageFacts) -> None:
        """Let the very images pass that a launch has found and pinned.

        Raises:
            IncompatibleError: The revisions are no supported triplet.
        """
        self._judge(supervisor, image_revision(Component.RUNTIME, self._config.sandbox_runtime_image, runtime))

    async def _admit(self, *, runtime: str, named: str = "", note: str = "") -> None:
        if (backend := self._config.delegated_backend) is not None:
            check_placeable(backend, engine_is_local=engine_is_local(self._config))
        supervisor_facts, runtime_facts = await together(
            self._present(self._config.supervisor_image), self._present(runtime)
        )
        self._judge(supervisor_facts, image_revision(Component.RUNTIME, named or runtime, runtime_facts, note=note))

    async def _present(self, reference: str) -> ImageFacts | None:
        try:
            return await self._engine.inspect_image(parse_reference(reference).local)
        except EngineAbsentError:
            return None

    def _judge(self, supervisor: ImageFacts | None, runtime: Revision) -> None:
        finding = judge(
            gateway_revision(self._handshake.peer, older=self._handshake.older),
            image_revision(Component.SUPERVISOR, self._config.supervisor_image, supervisor),
            runtime,
        )
        if finding.refused and self._config.compatibility is CompatibilityMode.ENFORCE:
            raise IncompatibleError(finding.message)
        if finding.outcome not in {Outcome.SUPPORTED, Outcome.NOT_HERE_YET}:
            self._tell(finding)

    def _tell(self, finding: Finding) -> None:
        """Log a finding once; a gateway that changes its words in each handshake cannot fill the memory."""
        if finding.message in self._told:
            return
        if len(self._told) >= _MAX_REMEMBERED:
            self._told.clear()
        self._told.add(finding.message)
        self._log.warning("revisions not verified", outcome=finding.outcome.value, detail=finding.message)
