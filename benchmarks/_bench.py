"""What every measurement of the driver uses: the real gateway and driver, the engine, and readers of what happens."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import docker
import docker.errors
import grpc

from benchmarks import _by_hand
from benchmarks._launches import Signer, driver_sandbox, gateway_metadata
from benchmarks._observers import BareEvents, DriverWatch
from benchmarks._processes import Driver, gateway_and_driver
from benchmarks._stand_ins import stand_ins
from openshell import OpenShell
from openshell.wire.compute.v1 import compute_driver_pb2 as pb
from openshell.wire.compute.v1 import compute_driver_pb2_grpc as rpc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

IMAGES = ("OPENSHELL_TEST_WORKLOAD_IMAGE", "OPENSHELL_TEST_RUNTIME_IMAGE", "OPENSHELL_TEST_SUPERVISOR_IMAGE")
"""Environment variables that name the images; `./dev bench` sets them."""


@dataclass(frozen=True, slots=True)
class Bench:
    """Everything that the measurements use."""

    host: str
    engine: docker.APIClient
    events: BareEvents
    driver: rpc.ComputeDriverStub
    watch: DriverWatch
    client: OpenShell
    images: tuple[str, str, str]
    """References of the workload's, the runtime's and the supervisor's image."""
    signer: Signer
    process: Driver
    say: Callable[[str], None]

    def own_client(self) -> docker.APIClient:
        """One more client of the engine, for a thread of its own; its caller closes it."""
        return _engine_client(self.host)

    def containers(self, sandbox_id: str) -> dict[str, str]:
        """The ids of a sandbox's containers by role."""
        wanted = {"label": [f"openshell.ai/sandbox-id={sandbox_id}", "openshell.ai/isolation-role"]}
        found = self.engine.containers(all=True, filters=wanted)
        return {each["Labels"]["openshell.ai/isolation-role"]: each["Id"] for each in found}

    def request(self, sandbox_id: str) -> pb.CreateSandboxRequest:
        """A request to create a sandbox, with fresh credentials."""
        launch = self.signer.launch_authentication(sandbox_id)
        return pb.CreateSandboxRequest(sandbox=driver_sandbox(sandbox_id, image=self.images[0], launch=launch))

    def shake_hands(self) -> None:
        """Introduce this gateway to the driver, as one does before it creates."""
        self.driver.GetCapabilities(pb.GetCapabilitiesRequest(gateway=gateway_metadata()))

    def delete(self, sandbox_id: str) -> None:
        """Delete a sandbox and wait for its end."""
        self.driver.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=sandbox_id))
        self.watch.wait_deleted(sandbox_id)


@contextlib.contextmanager
def open_bench(say: Callable[[str], None], *, with_stand_ins: bool = False) -> Iterator[Bench]:
    """Start everything; afterwards the engine is as it was.

    Args:
        say: Shows what is being done.
        with_stand_ins: Launch images whose programs do nothing, instead of the real ones.
    """
    host = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    real = (os.environ[IMAGES[0]], os.environ[IMAGES[1]], os.environ[IMAGES[2]])
    namespace = f"bench-{secrets.token_hex(4)}"
    engine = _engine_client(host)
    try:
        with (
            stand_ins(engine, real) if with_stand_ins else contextlib.nullcontext(real) as images,
            tempfile.TemporaryDirectory(prefix="openshell-bench-") as folder,
            gateway_and_driver(
                Path(folder), docker_host=host, namespace=namespace, workload=images[0], runtime=images[1],
                supervisor=images[2],
            ) as (endpoint, process),
            grpc.insecure_channel(f"unix:{process.socket}") as channel,
            OpenShell(endpoint) as client,
            BareEvents(host) as events,
        ):  # fmt: skip
            driver = rpc.ComputeDriverStub(channel)
            with DriverWatch(driver) as watch:
                yield Bench(host, engine, events, driver, watch, client, images, Signer.make(), process, say)
    finally:
        _sweep(engine, namespace)
        engine.close()


def _engine_client(host: str) -> docker.APIClient:
    return docker.APIClient(base_url=host, version="auto", timeout=120)


def _sweep(engine: docker.APIClient, namespace: str) -> None:
    """Remove what an interrupted round left, of the driver's and of what was made by hand."""
    for prefix in ("openshell.ai/", _by_hand.LABEL_PREFIX):
        ours = {"label": f"{prefix}sandbox-namespace={namespace}"}
        for container in engine.containers(all=True, filters=ours):
            with contextlib.suppress(docker.errors.APIError):
                engine.remove_container(container["Id"], force=True, v=True)
        for volume in engine.volumes(filters=ours)["Volumes"] or ():
            with contextlib.suppress(docker.errors.APIError):
                engine.remove_volume(volume["Name"], force=True)
