"""The sandbox runtime, delivered once an image ID as a named volume that all sandboxes mount read-only.

The engine copies the image's runtime folder into the empty volume when a container that mounts it is created. A crash
in the middle of that leaves half a tree, so a marker is written last; a volume without it is made again.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from driver_docker import labels, names
from driver_docker.concurrency import KeyedLocks
from driver_docker.engine import EngineAbsentError, EngineConflictError, EngineError
from driver_docker.engine_objects import ContainerSpec, VolumeMount, VolumeSpec
from driver_docker.errors import ProvisioningError
from driver_docker.plan import RUNTIME_DIR, RUNTIME_ENTRY
from driver_docker.staging import StagedEntry, build_tar, read_single_file
from driver_docker.workers import run_aside
from openshell.status import StatusCode

if TYPE_CHECKING:
    from driver_docker.engine import Engine
    from driver_docker.engine_objects import ImageFacts

_MARKER: Final = ".openshell-complete"
_STANDALONE_BINARY: Final = "/openshell-sandbox"
_MAX_BINARY_BYTES: Final = 512 * 1024 * 1024


class RuntimeVolumeError(ProvisioningError):
    """The sandbox runtime cannot be delivered."""

    default_reason = "BoundaryChannelCreateFailed"
    default_status = StatusCode.FAILED_PRECONDITION


class RuntimeVolumes:
    """Makes runtime volumes, and removes the unused ones at the end."""

    def __init__(self, engine: Engine, owner: labels.Owner) -> None:
        self._engine = engine
        self._owner = owner
        self._locks = KeyedLocks()
        self._complete: set[str] = set()

    async def ensure(self, image: ImageFacts, *, reference: str) -> str:
        """The name of a volume that holds this image's runtime, complete.

        Args:
            image: The runtime image.
            reference: How the operator named it, for error texts.

        Raises:
            RuntimeVolumeError: The image holds no runtime, or a foreign volume has the name.
            EngineError: The engine failed.
        """
        # Of this driver instance alone: a volume of another one, even of a dead one, is never in its way.
        place = f"{self._owner.namespace}/{self._owner.driver}"
        name = names.runtime_volume_name(namespace=place, image_id=image.image_id)
        async with self._locks.of(name):
            exists = await self._exists(name)
            if exists and name in self._complete:
                return name
            self._complete.discard(name)
            if exists and await self._fill(name, image, reference, fresh=False):
                self._complete.add(name)
                return name
            if exists:
                await self._engine.remove_volume(name)
            await self._engine.create_volume(VolumeSpec(name=name, labels=self._labels))
            await self._fill(name, image, reference, fresh=True)
            self._complete.add(name)
            return name

    async def remove_unused(self) -> None:
        """Remove every runtime volume of this driver that no container mounts."""
        for volume in await self._engine.list_volumes(self._labels):
            if labels.SANDBOX_ID not in volume.labels and volume.name.startswith("openshell-runtime-"):
                await self._remove(_filler(volume.name))  # left where the engine went away in the middle
                with contextlib.suppress(EngineConflictError, EngineAbsentError):
                    await self._engine.remove_volume(volume.name)
                self._complete.discard(volume.name)

    @property
    def _labels(self) -> dict[str, str]:
        return labels.owner_labels(self._owner) | {labels.ISOLATION_BACKEND: labels.BUILTIN_BACKEND}

    async def _exists(self, name: str) -> bool:
        try:
            facts = await self._engine.inspect_volume(name)
        except EngineAbsentError:
            return False
        if facts.driver != "local" or facts.options or not labels.is_owned(facts.labels, self._owner):
            raise RuntimeVolumeError(
                f"volume {name} exists but was not made by this driver; remove it or choose another sandbox_label"
            )
        return True

    async def _fill(self, name: str, image: ImageFacts, reference: str, *, fresh: bool) -> bool:
        """Create the container that fills an empty volume; whether the volume is complete afterwards."""
        spec = ContainerSpec(
            name=_filler(name),
            image=image.image_id,
            entrypoint=(RUNTIME_ENTRY,),
            labels=self._labels | {labels.ISOLATION_ROLE: labels.Role.STAGING.value},
            volumes=(VolumeMount(volume=name, target=RUNTIME_DIR, copy_image_content=True),),
        )
        await self._remove(spec.name)
        failed = True
        try:
            complete = await self._filled(spec, image, reference, fresh=fresh)
            failed = False
        finally:
            # By name: a cancelled create has been carried out, but its answer is lost.
            await self._remove(spec.name)
            if failed:
                with contextlib.suppress(EngineError):
                    await self._engine.remove_volume(name)
        return complete

    async def _filled(self, spec: ContainerSpec, image: ImageFacts, reference: str, *, fresh: bool) -> bool:
        container = await self._engine.create_container(spec)
        if not fresh:
            return await self._engine.has_path(container, f"{RUNTIME_DIR}/{_MARKER}")
        if not await self._engine.has_path(container, RUNTIME_ENTRY):
            await self._add_binary(container, reference)
        marker = StagedEntry(path=_MARKER, mode=0o444, content=image.image_id.encode())
        await self._engine.put_archive(container, RUNTIME_DIR, build_tar((marker,)))
        return True

    async def _remove(self, container: str) -> None:
        with contextlib.suppress(EngineError):
            await self._engine.remove_container(container)

    async def _add_binary(self, container: str, reference: str) -> None:
        """Deliver a runtime that is one static binary at the image's root."""
        try:
            tar = await self._engine.get_archive(container, _STANDALONE_BINARY, max_bytes=_MAX_BINARY_BYTES)
        except EngineAbsentError:
            raise RuntimeVolumeError(
                f"sandbox runtime image {reference} holds neither {RUNTIME_ENTRY} nor {_STANDALONE_BINARY}; "
                "set sandbox_runtime_image to an image that does"
            ) from None
        # Hundreds of megabytes may be copied here, more than once, and every RPC would wait.
        packed = await run_aside("runtime", lambda: _repacked(tar))
        if packed is None:
            raise RuntimeVolumeError(f"{_STANDALONE_BINARY} of sandbox runtime image {reference} is not a file")
        await self._engine.put_archive(container, RUNTIME_DIR, packed)


def _filler(volume: str) -> str:
    """The name of the container that fills a volume."""
    return f"{volume}-fill"


def _repacked(tar: bytes) -> bytes | None:
    """The archive of the binary at its place, from the archive of the binary where the image has it."""
    binary = read_single_file(tar)
    if binary is None:
        return None
    return build_tar((StagedEntry(path="openshell-sandbox", mode=0o555, content=binary),))
