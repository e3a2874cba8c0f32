"""The driver's own images: a tag that moves is followed at each start, and what is used is always pinned by its ID."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING

import pytest
from scripted.compute_gateway import ready
from scripted.stub_images import REVISION, SUPERVISOR, root_tar
from structlog.testing import capture_logs

from openshell.wire.compute.v1 import compute_driver_pb2 as pb

if TYPE_CHECKING:
    from docker import APIClient
    from scripted.compute_gateway import ComputeGateway
    from scripted.driver_bench import DriverBench
    from scripted.image_registry import ImageRegistry, PushedImage, RegistryRelay


def push_supervisor(registry: ImageRegistry, name: str) -> PushedImage:
    """A stand-in supervisor whose content is new each time."""
    files = {
        "openshell-supervisor": (SUPERVISOR.encode(), 0o555),
        "etc/marker": (secrets.token_bytes(8), 0o644),
    }
    config = {
        "User": "65534:65534",
        "Env": ["PATH=/bin"],
        "Labels": {"org.opencontainers.image.version": REVISION},
    }
    return registry.push(name, [root_tar(files)], config=config)


async def used(bench: DriverBench, link: ComputeGateway) -> str:
    """The image that a new sandbox's supervisor runs."""
    wanted = bench.sandbox()
    assert ready(await bench.launch(link, wanted)).status == "True"
    image: str = bench.container(wanted.id, "supervisor")["Image"]
    await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))
    return image


@pytest.mark.parametrize("tag", ["dev", "latest"])
async def test_field_report_13_a_moving_supervisor_tag_is_followed_at_each_start(
    registry: ImageRegistry, relay: RegistryRelay, bench: DriverBench, tag: str
) -> None:
    name = f"s{secrets.token_hex(6)}:{tag}"
    reference = f"{relay.address}/{name}"
    first = push_supervisor(registry, name)
    async with bench.running(supervisor_image=reference) as (_, link):
        assert await used(bench, link) == first.image_id
    second = push_supervisor(registry, name)
    async with bench.running(supervisor_image=reference) as (_, link):
        assert await used(bench, link) == second.image_id
        asked = len(relay.asked)
        assert await used(bench, link) == second.image_id
        assert len(relay.asked) == asked, "a launch asks no registry for what is here"


async def test_field_report_13_a_supervisor_that_is_tagged_anew_is_used_without_a_restart(
    bench: DriverBench, registry: ImageRegistry, relay: RegistryRelay, docker_client: APIClient
) -> None:
    repository = f"s{secrets.token_hex(6)}"
    first = push_supervisor(registry, f"{repository}:1")
    second = push_supervisor(registry, f"{repository}:2")
    where = f"{relay.address}/{repository}"
    await asyncio.to_thread(docker_client.pull, where, tag="2")
    async with bench.running(supervisor_image=f"{where}:1") as (_, link):
        assert await used(bench, link) == first.image_id
        docker_client.tag(second.image_id, where, "1", force=True)
        assert await used(bench, link) == second.image_id


async def test_a_fixed_supervisor_tag_is_pulled_only_where_it_is_missing(
    registry: ImageRegistry, relay: RegistryRelay, bench: DriverBench
) -> None:
    name = f"s{secrets.token_hex(6)}:1.2.3"
    reference = f"{relay.address}/{name}"
    first = push_supervisor(registry, name)
    async with bench.running(supervisor_image=reference) as (_, link):
        assert await used(bench, link) == first.image_id
    push_supervisor(registry, name)
    asked = len(relay.asked)
    async with bench.running(supervisor_image=reference, image_pull_policy="if_not_present") as (_, link):
        assert await used(bench, link) == first.image_id
    assert len(relay.asked) == asked


async def test_a_registry_that_is_gone_does_not_keep_a_driver_with_a_copy_from_working(
    registry: ImageRegistry, relay: RegistryRelay, bench: DriverBench
) -> None:
    name = f"s{secrets.token_hex(6)}:dev"
    reference = f"{relay.address}/{name}"
    first = push_supervisor(registry, name)
    async with bench.running(supervisor_image=reference) as (_, link):
        assert await used(bench, link) == first.image_id
    await relay.__aexit__(None, None, None)
    with capture_logs() as logs:
        async with bench.running(supervisor_image=reference) as (_, link):
            assert await used(bench, link) == first.image_id
    assert any(entry["event"].startswith("image not refreshed") for entry in logs)


async def test_nothing_is_refreshed_where_nothing_is_to_be_pulled(
    registry: ImageRegistry, relay: RegistryRelay, bench: DriverBench, docker_client: APIClient
) -> None:
    name = f"s{secrets.token_hex(6)}:dev"
    reference = f"{relay.address}/{name}"
    first = push_supervisor(registry, name)
    await asyncio.to_thread(docker_client.pull, reference)
    push_supervisor(registry, name)
    asked = len(relay.asked)
    async with bench.running(supervisor_image=reference, image_pull_policy="never") as (_, link):
        assert await used(bench, link) == first.image_id
    assert len(relay.asked) == asked
