"""Symbolic links in images, as a real engine has them: followed for mounts, for the workspace and for account files."""

from __future__ import annotations

import io
import secrets
import tarfile
from typing import TYPE_CHECKING, Any

import pytest
from scripted.compute_gateway import ready
from scripted.stub_images import REPOSITORY

from openshell.wire.compute.v1 import compute_driver_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from docker import APIClient
    from scripted.compute_gateway import ComputeGateway
    from scripted.driver_bench import DriverBench

ADMITTED = {"openshell.ai/sandbox-attachable": "true", "openshell.ai/sandbox-attachable-workspace": "default"}


@pytest.fixture
def volume(docker_client: APIClient) -> Iterator[str]:
    """A volume that may be mounted."""
    name = f"t-{secrets.token_hex(6)}"
    docker_client.create_volume(name, labels=ADMITTED)
    yield name
    # Whatever a failed test left would keep it in use.
    for row in docker_client.containers(all=True, filters={"volume": name}):
        docker_client.remove_container(row["Id"], force=True, v=True)
    docker_client.remove_volume(name)


@pytest.fixture
def linked_image(docker_client: APIClient, bench: DriverBench) -> Iterator[Callable[..., str]]:
    """Derives images from the stand-in workload with symbolic links (text) and files (bytes) in them."""
    made: list[str] = []

    def derive(paths: dict[str, str | bytes], *changes: str) -> str:
        tag = secrets.token_hex(4)
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for name, held in paths.items():
                header = tarfile.TarInfo(name)
                if isinstance(held, str):
                    header.type, header.linkname = tarfile.SYMTYPE, held
                    archive.addfile(header)
                else:
                    header.size, header.mode = len(held), 0o644
                    archive.addfile(header, io.BytesIO(held))
        container = docker_client.create_container(
            bench.images.workload, entrypoint=["/x"], labels={"openshell.ai/sandbox-namespace": bench.namespace}
        )
        docker_client.put_archive(container["Id"], "/", buffer.getvalue())
        docker_client.commit(container["Id"], repository=f"{REPOSITORY}/linked", tag=tag, changes=list(changes))
        docker_client.remove_container(container["Id"])
        made.append(f"{REPOSITORY}/linked:{tag}")
        return made[-1]

    yield derive
    for reference in made:
        docker_client.remove_image(reference, force=True)


def with_mount(wanted: pb.DriverSandbox, **mount: Any) -> pb.DriverSandbox:
    wanted.spec.template.driver_config.update({"mounts": [mount]})
    return wanted


async def delete(link: ComputeGateway, wanted: pb.DriverSandbox) -> None:
    await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))


@pytest.mark.parametrize("kind", ["volume", "tmpfs", "image volume"])
@pytest.mark.parametrize(
    ("links", "target"),
    [
        ({"x": "/.openshell"}, "/x/runtime"),
        ({"x": "y", "y": "/etc/../.openshell/channel"}, "/x/sandbox"),
        ({"x": "/"}, "/x/proc/y"),
    ],
)
async def test_a_link_of_the_image_never_brings_a_mount_over_the_runtime(
    bench: DriverBench,
    volume: str,
    linked_image: Callable[..., str],
    links: dict[str, str],
    target: str,
    kind: str,
) -> None:
    async with bench.running(allow_driver_config=True) as (_, link):
        if kind == "image volume":
            wanted = bench.sandbox(image=linked_image(links, f"VOLUME {target}"))
        else:
            source = {"source": volume} if kind == "volume" else {}
            wanted = with_mount(bench.sandbox(image=linked_image(links)), type=kind, target=target, **source)
        observed = await bench.launch(link, wanted)
        assert ready(observed).reason == "WorkspaceValidationFailed"
        assert "symbolic link" in ready(observed).message
        await delete(link, wanted)


@pytest.mark.parametrize("kind", ["volume", "tmpfs"])
@pytest.mark.parametrize(
    ("paths", "target", "changes"),
    [
        ({"x": "/srv", "srv/work/file": b""}, "/x", ("WORKDIR /srv/work",)),
        ({"srv/w/file": b"", "work": "/srv/w"}, "/srv", ("WORKDIR /work",)),
    ],
)
async def test_a_link_of_the_image_never_brings_a_mount_over_the_workspace(
    bench: DriverBench,
    volume: str,
    linked_image: Callable[..., str],
    paths: dict[str, str | bytes],
    target: str,
    changes: tuple[str, ...],
    kind: str,
) -> None:
    async with bench.running(allow_driver_config=True) as (_, link):
        source = {"source": volume} if kind == "volume" else {}
        wanted = with_mount(bench.sandbox(image=linked_image(paths, *changes)), type=kind, target=target, **source)
        observed = await bench.launch(link, wanted)
        assert ready(observed).reason == "WorkspaceValidationFailed"
        assert "covers the workspace" in ready(observed).message
        await delete(link, wanted)


async def test_a_harmless_link_of_the_image_is_followed(
    bench: DriverBench, volume: str, linked_image: Callable[..., str]
) -> None:
    async with bench.running(allow_driver_config=True) as (_, link):
        wanted = bench.sandbox(image=linked_image({"x": "/srv/deep"}))
        with_mount(wanted, type="volume", source=volume, target="/x/data")
        assert ready(await bench.launch(link, wanted)).reason == "BackendReady"
        await delete(link, wanted)


async def test_account_files_that_are_links_are_read_where_they_lead(
    bench: DriverBench, linked_image: Callable[..., str]
) -> None:
    paths = {
        "store/passwd": b"agent:x:4711:4712:a comment\xc2\x85 with an odd character:/:/bin/sh\n",
        "store/inner": "/store/passwd",
        "etc/passwd": "../store/inner",
        "etc/group": "/store/nowhere",
    }
    async with bench.running() as (_, link):
        wanted = bench.sandbox(
            image=linked_image({"store/passwd": paths["store/passwd"], "etc/passwd": "../store/passwd"})
        )
        await bench.launch(link, wanted)
        assert bench.container(wanted.id, "sandbox")["Config"]["User"] == "4711:4712"
        await delete(link, wanted)
        wanted = bench.sandbox(image=linked_image(paths))
        observed = await bench.launch(link, wanted)
        assert ready(observed).reason == "IdentityResolutionFailed"
        assert "/etc/group of the image is a symbolic link to /store/nowhere" in ready(observed).message
        await delete(link, wanted)
