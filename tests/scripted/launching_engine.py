"""An engine in memory that sandboxes are really launched on: with images, volumes and files."""

from __future__ import annotations

import io
import tarfile
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import AsyncMock

from driver_docker.config_sources import load_config
from driver_docker.engine import EngineAbsentError, EngineConflictError
from driver_docker.engine_objects import ContainerStatus, EngineInfo, ExecResult, ImageFacts, VolumeFacts
from driver_docker.launch import Launcher
from scripted.memory_engine import MemoryEngine, memory_driver

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from driver_docker.engine_objects import ContainerSpec, VolumeSpec
    from scripted.memory_engine import MemoryDriver

USER_IMAGE, SUPERVISOR_IMAGE, RUNTIME_IMAGE = "user:1", "acme/supervisor:1", "acme/sandbox:1"


class LaunchingEngine(MemoryEngine):
    """Enough of an engine to launch on; a supervisor is healthy as soon as it is asked."""

    info = EngineInfo(version="28", api_version="1.51", operating_system="linux", architecture="amd64")

    async def inspect_image(self, reference: str) -> ImageFacts:
        self._called("inspect_image", reference)
        return ImageFacts(image_id=f"sha256:{reference}", user="agent")

    async def create_volume(self, spec: VolumeSpec) -> VolumeFacts:
        self._called("create_volume", spec.name)
        made = VolumeFacts(name=spec.name, driver="local", labels=spec.labels, options={})
        return self.volumes.setdefault(spec.name, made)

    async def inspect_volume(self, name: str) -> VolumeFacts:
        self._called("inspect_volume", name)
        if name not in self.volumes:
            raise EngineAbsentError(name)
        return self.volumes[name]

    async def create_container(self, spec: ContainerSpec) -> str:
        self._called("create_container", spec.name)
        if spec.name in self.containers:
            raise EngineConflictError(spec.name)
        self.hold(spec.name, labels=spec.labels, image_id=spec.image, status=ContainerStatus.CREATED, started_at=None)
        return spec.name

    async def put_archive(self, container: str, path: str, tar: bytes) -> None:
        self._called("put_archive", container)

    async def has_path(self, container: str, path: str) -> bool:
        self._called("has_path", path)
        return True

    async def get_archive(self, container: str, path: str, *, max_bytes: int) -> bytes:
        self._called("get_archive", path)
        content = b"agent:x:1200:1300::/:/bin/sh\n" if path == "/etc/passwd" else b"agents:x:1300:\n"
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            header = tarfile.TarInfo("file")
            header.size = len(content)
            archive.addfile(header, io.BytesIO(content))
        return buffer.getvalue()

    async def start_container(self, container: str) -> None:
        self._called("start_container", container)
        self.change(container, status=ContainerStatus.RUNNING)

    async def exec_command(self, container: str, argv: tuple[str, ...], *, timeout_seconds: float) -> ExecResult:
        self._called("exec_command", container)
        return ExecResult(exit_code=0)


@asynccontextmanager
async def launching(folder: Path, **keys: Any) -> AsyncIterator[tuple[MemoryDriver, Launcher]]:
    """A driver over such an engine, and what launches on it."""
    async with memory_driver(folder) as driver:
        services = driver.services
        services.engine = driver.engine = cast("Any", LaunchingEngine())
        services.config = load_config(
            {
                "bind_socket": folder / "d.sock",
                "state_dir": folder / "state",
                "supervisor_image": SUPERVISOR_IMAGE,
                "sandbox_runtime_image": RUNTIME_IMAGE,
            }
            | keys,
            environment={},
        )
        cast("Any", services.gate).admit_images = lambda **_: None
        cast("Any", services.gate).admit_again = AsyncMock()
        launcher = Launcher(services)
        try:
            yield driver, launcher
        finally:
            launcher.close()
