"""A whole driver in the test's process on the real engine, with stand-in images under it and a gateway in front."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import tempfile
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from docker.errors import NotFound

from driver_docker.config import DriverConfig
from driver_docker.config_sources import load_config
from driver_docker.engine_docker import DockerEngine
from driver_docker.serve import Driver
from openshell.wire.compute.v1 import compute_driver_pb2 as pb
from scripted import compute_gateway as gateway

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from docker import APIClient

    from driver_docker.engine import Engine
    from scripted.stub_images import StubImages

ROLE = "openshell.ai/isolation-role"
SANDBOX_ID = "openshell.ai/sandbox-id"
NAMESPACE = "openshell.ai/sandbox-namespace"


@dataclass
class DriverBench:
    """Where a driver runs, and what it finds there."""

    docker_host: str
    client: APIClient
    images: StubImages
    folder: Path
    namespace: str

    def config(self, **changes: Any) -> DriverConfig:
        """The driver's configuration."""
        values: dict[str, Any] = {
            "bind_socket": self.folder / "s" / "d.sock",
            "state_dir": self.folder / "state",
            "socket_path": self.docker_host,
            "sandbox_label": self.namespace,
            "sandbox_runtime_image": self.images.runtime,
            "supervisor_image": self.images.supervisor,
            "default_image": self.images.workload,
            "stop_grace_seconds": 2,
            "supervisor_stop_grace_seconds": 2,
        }
        return load_config(values | changes, environment={})

    @asynccontextmanager
    async def running(
        self, *, wrap: Callable[[Engine], Any] | None = None, **changes: Any
    ) -> AsyncIterator[tuple[Driver, gateway.ComputeGateway]]:
        """A driver that serves, and a gateway that watches it.

        Args:
            wrap: Puts something between the driver and the engine.
            changes: Keys of the configuration.
        """
        config = self.config(**changes)
        async with (
            await DockerEngine.connect(self.docker_host) as engine,
            Driver(config, wrap(engine) if wrap is not None else engine) as driver,
            gateway.ComputeGateway(f"unix:{config.bind_socket}") as link,
        ):
            yield driver, link

    def sandbox(self, name: str = "steady", image: str = "", **template: Any) -> pb.DriverSandbox:
        """A sandbox on the stand-in workload."""
        return gateway.sandbox(image or self.images.workload, name=name, **template)

    async def launch(self, link: gateway.ComputeGateway, sandbox: pb.DriverSandbox) -> pb.DriverSandbox:
        """Create a sandbox and wait until it is settled."""
        await link.stub.CreateSandbox(pb.CreateSandboxRequest(sandbox=sandbox))
        return await link.wait_ready(sandbox.id)

    def container(self, sandbox_id: str, role: str) -> dict[str, Any]:
        """The inspect of a sandbox's workload (`sandbox`) or `supervisor`."""
        rows = self.client.containers(all=True, filters={"label": [f"{SANDBOX_ID}={sandbox_id}", f"{ROLE}={role}"]})
        assert len(rows) == 1, rows
        found: dict[str, Any] = self.client.inspect_container(rows[0]["Id"])
        return found

    def left_over(self) -> list[str]:
        """Names of containers and volumes of this bench that exist."""
        filters = {"label": f"{NAMESPACE}={self.namespace}"}
        names = [(row["Names"] or [row["Id"]])[0] for row in self.client.containers(all=True, filters=filters)]
        return names + [volume["Name"] for volume in self.client.volumes(filters=filters)["Volumes"] or []]

    def sandbox_left_over(self, sandbox_id: str) -> list[str]:
        """Names of containers and volumes of one sandbox that exist."""
        filters = {"label": f"{SANDBOX_ID}={sandbox_id}"}
        names = [(row["Names"] or [row["Id"]])[0] for row in self.client.containers(all=True, filters=filters)]
        return names + [volume["Name"] for volume in self.client.volumes(filters=filters)["Volumes"] or []]

    def clear(self) -> None:
        """Remove whatever a test left, also after its failure."""
        filters = {"label": f"{NAMESPACE}={self.namespace}"}
        for row in self.client.containers(all=True, filters=filters):
            with contextlib.suppress(NotFound):  # a driver that ends may be quicker
                self.client.remove_container(row["Id"], force=True, v=True)
        for volume in self.client.volumes(filters=filters)["Volumes"] or []:
            self.client.remove_volume(volume["Name"], force=True)
        shutil.rmtree(self.folder, ignore_errors=True)


def make_bench(docker_host: str, client: APIClient, images: StubImages) -> DriverBench:
    """A bench with a namespace and a folder of its own, whose socket's path is short enough."""
    return DriverBench(
        docker_host=docker_host,
        client=client,
        images=images,
        folder=Path(tempfile.mkdtemp(prefix="drv-")),
        namespace=f"t-{secrets.token_hex(6)}",
    )
