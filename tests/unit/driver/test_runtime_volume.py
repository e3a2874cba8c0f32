"""A runtime that is one large binary is packed beside the loop, not on it."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, cast

import pytest

from driver_docker.engine import EngineAbsentError
from driver_docker.engine_objects import ContainerSpec, ImageFacts, VolumeFacts, VolumeSpec
from driver_docker.labels import Owner
from driver_docker.runtime_volume import RuntimeVolumeError, RuntimeVolumes
from driver_docker.staging import StagedEntry, build_tar, read_single_file

if TYPE_CHECKING:
    from collections.abc import Iterable

    from driver_docker.engine import Engine

IMAGE = ImageFacts(image_id="sha256:1", user="", working_dir="", volumes=(), labels={})


class BinaryEngine:
    """An image whose only file is the binary at its root."""

    def __init__(self, tar: bytes) -> None:
        self._tar = tar
        self.put: list[bytes] = []

    async def inspect_volume(self, name: str) -> VolumeFacts:
        raise EngineAbsentError("no such volume")

    async def create_volume(self, spec: VolumeSpec) -> VolumeFacts:
        return VolumeFacts(name=spec.name, driver="local", labels=spec.labels, options={}, created_at=None)

    async def remove_volume(self, name: str) -> None:
        return

    async def create_container(self, spec: ContainerSpec) -> str:
        return spec.name

    async def remove_container(self, container: str) -> None:
        return

    async def has_path(self, container: str, path: str) -> bool:
        return False

    async def get_archive(self, container: str, path: str, *, max_bytes: int) -> bytes:
        return self._tar

    async def put_archive(self, container: str, path: str, tar: bytes) -> None:
        self.put.append(tar)


async def _deliver(engine: BinaryEngine) -> RuntimeVolumes:
    volumes = RuntimeVolumes(cast("Engine", engine), Owner(namespace="n", driver="d"))
    await volumes.ensure(IMAGE, reference="runtime:1")
    return volumes


async def test_the_loop_goes_on_while_a_binary_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = BinaryEngine(build_tar((StagedEntry(path="openshell-sandbox", mode=0o755, content=b"binary"),)))
    packing, loop_went_on = threading.Event(), threading.Event()

    def pack(entries: Iterable[StagedEntry]) -> bytes:
        packing.set()
        assert loop_went_on.wait(10), "the loop waits for the packing"
        return build_tar(entries)

    monkeypatch.setattr("driver_docker.runtime_volume.build_tar", pack)
    delivery = asyncio.create_task(_deliver(engine))
    await asyncio.to_thread(packing.wait, 10)
    loop_went_on.set()
    volumes = await delivery
    assert not volumes._locks
    assert read_single_file(engine.put[0]) == b"binary"


async def test_a_binary_that_is_no_file_is_named() -> None:
    engine = BinaryEngine(build_tar((StagedEntry(path="openshell-sandbox", mode=0o755),)))
    with pytest.raises(RuntimeVolumeError, match=r"runtime:1 is not a file"):
        await _deliver(engine)
