"""A real driver process over a real engine, with a supervisor and a runtime that end as a test wants."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import docker
import pytest
from scripted.compute_gateway import ComputeGateway, sandbox

from devtools.images import load_images, unload_images
from devtools.images.archive import Entry, ImageConfig, directory
from devtools.images.cache import ArtifactCache
from devtools.images.layout import RUNTIME_ENTRY, ImageRecipe, Role, files_layer, labels
from devtools.images.variants import build_test_image, supervisor_stub
from devtools.inventory import RUN_LABEL
from openshell.wire.compute.v1 import compute_driver_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from docker import APIClient

    from devtools.images import BuiltImage

_STOP_SECONDS = 15.0

# What it does is the first word of the sandbox's name; the second is an exit code. SIGUSR1 sets it off where it waits.
SUPERVISOR = r"""
begin='{"openshell_last_words":1,"stage":"attach","category":"configuration","private":"p","public":"'
words() { echo "$begin$1\"}"; }
name="$OPENSHELL_SANDBOX"; verb="${name%%-*}"; code="${name#*-}"; code="${code%%-*}"
case "$verb" in
  early) words "gave up" >&2; exit "$code";;
  forge) words "forged"; exit "$code";;
  leak) token=$(/bin/busybox sed 's/.*"gateway_token":"\([^"]*\)".*/\1/' /.openshell/supervisor/auth.json)
        words "rejected $token" >&2; exit "$code";;
esac
trap 'exit 143' TERM
case "$verb" in
  late) trap 'words "gave up" >&2; exit "$code"' USR1;;
  oom) trap 'exec /bin/busybox tail /dev/zero' USR1;;
esac
while :; do /bin/busybox sleep 1000 & wait $!; done
"""

# What it does is the sandbox's log level, the only word of a sandbox that reaches a runtime's environment.
RUNTIME = r"""#!/bin/sh
case "$OPENSHELL_LOG_LEVEL" in
  oom) exec /bin/busybox tail /dev/zero;;
  child-oom) /bin/busybox tail /dev/zero; exit 5;;
esac
trap 'exit 143' TERM
trap 'exit 7' USR1
while :; do /bin/busybox sleep 1000 & wait $!; done
"""


def runtime_recipe() -> ImageRecipe:
    """A sandbox runtime that is a few lines of shell, run by the workload's own."""
    entry = Entry(path=RUNTIME_ENTRY[1:], mode=0o555, content=RUNTIME.encode())
    folders = [directory(".openshell"), directory(".openshell/runtime", mode=0o555)]
    layer = files_layer("runtime-stub", [*folders, entry])
    return ImageRecipe(
        name="test-runtime-stub", layers=(layer,), config=ImageConfig(labels=labels(Role.RUNTIME, "0.0.0", ""))
    )


@dataclass(frozen=True, slots=True)
class RunningDriver:
    """A driver process that serves."""

    address: str
    namespace: str


class Drivers:
    """Starts driver processes and ends them; what one leaves on the engine fails the test."""

    def __init__(self, client: APIClient, docker_host: str, folder: Path, workload: str) -> None:
        self._client, self._host, self._folder, self._workload = client, docker_host, folder, workload
        self._images = ArtifactCache(folder / "images")

    @contextlib.contextmanager
    def image(self, recipe: ImageRecipe) -> Iterator[BuiltImage]:
        """Have an image in the engine."""
        run = {RUN_LABEL: os.environ.get("OPENSHELL_TEST_RUN", "by-hand")}
        built = build_test_image(recipe, cache=self._images, extra_labels=run)
        loaded = load_images(self._client, [built], cache=self._images)
        try:
            yield built
        finally:
            unload_images(self._client, loaded)

    @contextlib.contextmanager
    def running(self, *, supervisor: ImageRecipe, runtime: ImageRecipe) -> Iterator[RunningDriver]:
        """Run a driver with these images."""
        namespace = f"verdicts-{secrets.token_hex(4)}"
        folder = self._folder / namespace
        folder.mkdir(mode=0o700)
        with self.image(supervisor) as supervisor_image, self.image(runtime) as runtime_image:
            arguments = [
                str(Path(sys.executable).with_name("openshell-driver-docker")), "serve",
                "--bind-socket", str(folder / "s"), "--docker-socket", self._host, "--state-dir", str(folder / "state"),
                "--grpc-endpoint", "http://127.0.0.1:1", "--sandbox-label", namespace,
                "--supervisor-image", supervisor_image.reference, "--sandbox-runtime-image", runtime_image.reference,
                "--default-image", self._workload,
            ]  # fmt: skip
            with (folder / "log").open("wb") as log:
                process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=log, text=True)
            with process:
                try:
                    assert process.stdout is not None
                    told = process.stdout.readline()
                    assert told.startswith("serving on "), (folder / "log").read_text("utf-8", errors="replace")
                    yield RunningDriver(address=f"unix:{folder / 's'}", namespace=namespace)
                finally:
                    process.send_signal(signal.SIGTERM)
                    try:
                        process.wait(_STOP_SECONDS)
                    except subprocess.TimeoutExpired:
                        process.kill()
            assert self._left(namespace) == []

    def _left(self, namespace: str) -> list[str]:
        mine = {"label": f"openshell.ai/sandbox-namespace={namespace}"}
        containers = [container["Id"] for container in self._client.containers(all=True, filters=mine)]
        volumes = [volume["Name"] for volume in self._client.volumes(filters=mine)["Volumes"] or ()]
        for container in containers:
            self._client.remove_container(container, force=True, v=True)
        for volume in volumes:
            self._client.remove_volume(volume, force=True)
        return [*containers, *volumes]


@dataclass(slots=True)
class Sandboxes:
    """A gateway's side of a driver, and the engine's side of its sandboxes."""

    gateway: ComputeGateway
    client: APIClient
    image: str

    async def launch(self, name: str, *, memory_limit: str = "", log_level: str = "") -> str:
        """Create a sandbox and wait until it is ready or has failed; its id."""
        wanted = sandbox(self.image, name=name)
        wanted.spec.log_level = log_level
        if memory_limit:
            wanted.spec.template.resources.memory_limit = memory_limit
        await self.gateway.stub.CreateSandbox(pb.CreateSandboxRequest(sandbox=wanted))
        await self.gateway.wait_ready(wanted.id)
        return wanted.id

    def container(self, sandbox_id: str, role: str) -> str:
        """The id of one of its containers."""
        wanted = {"label": [f"openshell.ai/sandbox-id={sandbox_id}", f"openshell.ai/isolation-role={role}"]}
        (found,) = self.client.containers(all=True, filters=wanted)
        return str(found["Id"])

    async def exit_event(self, sandbox_id: str, component: str) -> pb.DriverPlatformEvent:
        """The platform event with the verdict on one of its containers."""
        _, event = await self.gateway.wait(
            lambda event: (
                event.platform_event.sandbox_id == sandbox_id
                and event.platform_event.event.metadata.get("openshell.verdict.component") == component
            )
        )
        return event.platform_event.event

    async def delete(self, sandbox_id: str) -> None:
        """Delete it."""
        await self.gateway.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=sandbox_id))


@pytest.fixture(scope="module")
def drivers(docker_host: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drivers]:
    workload = os.environ.get("OPENSHELL_TEST_WORKLOAD_IMAGE")
    if not workload:
        if os.environ.get("OPENSHELL_REQUIRE_ENGINE") == "1":
            pytest.fail("OPENSHELL_TEST_WORKLOAD_IMAGE is not set", pytrace=False)
        pytest.skip("OPENSHELL_TEST_WORKLOAD_IMAGE is not set (./dev test sets it)")
    client = docker.APIClient(base_url=docker_host, version="auto", timeout=60)
    try:
        yield Drivers(client, docker_host, tmp_path_factory.mktemp("v"), workload)
    finally:
        client.close()


@pytest.fixture(scope="module")
def stub_driver(drivers: Drivers) -> Iterator[RunningDriver]:
    """A driver whose supervisor and runtime are the scripts above."""
    supervisor = supervisor_stub("verdicts", SUPERVISOR, health_exit_code=0)
    with drivers.running(supervisor=supervisor, runtime=runtime_recipe()) as running:
        yield running


@pytest.fixture
def connect(
    docker_client: APIClient, workload_image: str
) -> Callable[[RunningDriver], contextlib.AbstractAsyncContextManager[Sandboxes]]:
    """Connects to a driver; its sandboxes are deleted at the end."""

    @contextlib.asynccontextmanager
    async def connected(driver: RunningDriver) -> AsyncIterator[Sandboxes]:
        async with ComputeGateway(driver.address) as gateway:
            try:
                yield Sandboxes(gateway, docker_client, workload_image)
            finally:
                listed = await gateway.stub.ListSandboxes(pb.ListSandboxesRequest())
                for each in listed.sandboxes:
                    await gateway.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=each.id))

    return connected


@pytest.fixture
async def sandboxes(
    stub_driver: RunningDriver,
    connect: Callable[[RunningDriver], contextlib.AbstractAsyncContextManager[Sandboxes]],
) -> AsyncIterator[Sandboxes]:
    """Sandboxes of the stub driver."""
    async with connect(stub_driver) as connected:
        yield connected
