"""Images come from a real registry: what is asked for, how often, what watchers see, and how failures read."""

from __future__ import annotations

import asyncio
import re
import secrets
from typing import TYPE_CHECKING

import grpc
import pytest
from scripted.compute_gateway import ready
from scripted.image_registry import noise_layer, workload_layer

from openshell.wire.compute.v1 import compute_driver_pb2 as pb

if TYPE_CHECKING:
    from docker import APIClient
    from scripted.compute_gateway import ComputeGateway
    from scripted.driver_bench import DriverBench
    from scripted.image_registry import ImageRegistry, PushedImage, RegistryRelay

USER = {"User": "agent", "Env": ["PATH=/bin"]}
MIB = 1024 * 1024


def push(registry: ImageRegistry, *, noise_bytes: int = 0, name: str = "") -> PushedImage:
    """An image of the test's own that a sandbox can run in."""
    layers = [workload_layer(secrets.token_hex(8))]
    if noise_bytes:
        layers.append(noise_layer(noise_bytes))
    return registry.push(name or f"w{secrets.token_hex(6)}:1", layers, config=USER)


async def create(link: ComputeGateway, sandbox: pb.DriverSandbox) -> None:
    await link.stub.CreateSandbox(pb.CreateSandboxRequest(sandbox=sandbox))


async def delete(link: ComputeGateway, *sandboxes: pb.DriverSandbox) -> None:
    for sandbox in sandboxes:
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=sandbox.id))


def reasons(link: ComputeGateway, sandbox: pb.DriverSandbox) -> list[str]:
    return [event.reason for event in link.platform_events(sandbox.id)]


def failure(observed: pb.DriverSandbox) -> str:
    """The text of an image that was not had."""
    condition = ready(observed)
    assert condition.reason == "ImagePullFailed"
    assert condition.message.isprintable()
    assert len(condition.message.encode()) <= 1024
    return condition.message


async def test_a_pull_is_told_so_that_a_client_can_draw_it_and_the_image_is_pinned_by_id(
    registry: ImageRegistry, relay: RegistryRelay, bench: DriverBench
) -> None:
    image = push(registry, noise_bytes=24 * MIB)
    reference = f"{relay.address}/{image.name}"
    async with bench.running() as (_, link):
        wanted = bench.sandbox(image=reference)
        assert ready(await bench.launch(link, wanted)).status == "True"
        assert bench.container(wanted.id, "sandbox")["Image"] == image.image_id
        events = link.platform_events(wanted.id)
        order = list(dict.fromkeys(event.reason for event in events))
        assert order[:4] == ["Scheduled", "Pulling", "PullingLayer", "Pulled"]
        layers = [event.metadata for event in events if event.reason == "PullingLayer"]
        assert all(metadata["image_ref"] == reference for metadata in layers)
        assert all(metadata["openshell.progress.active_step"] == "pulling_image" for metadata in layers)
        last = {metadata["layer_id"]: metadata["docker_status"] for metadata in layers}
        assert last == {digest.removeprefix("sha256:")[:12]: "Pull complete" for digest in image.layers}
        drawn = [metadata["openshell.progress.active_detail"] for metadata in layers]
        assert any(re.fullmatch(r"Downloading [0-9a-f]{12} \(\d+KB/24MB\)|.* \(\d+MB/24MB\)", text) for text in drawn)

        again = bench.sandbox(image=reference)
        await bench.launch(link, again)
        assert reasons(link, again)[:2] == ["Scheduled", "ImagePresent"]
        assert relay.count("GET", "/manifests/") == 1
        await delete(link, wanted, again)


@pytest.mark.parametrize("form", ["name", "tag", "digest", "tag and digest"])
async def test_field_report_docker_py_1643_exactly_what_is_named_is_pulled(
    registry: ImageRegistry, relay: RegistryRelay, bench: DriverBench, docker_client: APIClient, form: str
) -> None:
    repository = f"r{secrets.token_hex(6)}"
    pushed = {tag: push(registry, name=f"{repository}:{tag}") for tag in ("one", "two", "latest")}
    where = f"{relay.address}/{repository}"
    two = pushed["two"].digest
    reference, asked, expected = {
        "name": (where, "latest", pushed["latest"]),
        "tag": (f"{where}:one", "one", pushed["one"]),
        "digest": (f"{where}@{two}", two, pushed["two"]),
        "tag and digest": (f"{where}:one@{two}", two, pushed["two"]),
    }[form]
    async with bench.running() as (_, link):
        wanted = bench.sandbox(image=reference)
        assert ready(await bench.launch(link, wanted)).status == "True"
        assert bench.container(wanted.id, "sandbox")["Image"] == expected.image_id
        manifests = [path.rpartition("/")[2] for path in relay.asked if "/manifests/" in path]
        assert manifests[0] == asked
        assert set(manifests) <= {asked, expected.digest}
        assert [image["Id"] for image in docker_client.images(name=where)] == [expected.image_id]
        await delete(link, wanted)


async def test_always_follows_a_tag_that_moved_and_if_not_present_does_not(
    registry: ImageRegistry, relay: RegistryRelay, bench: DriverBench
) -> None:
    name = f"w{secrets.token_hex(6)}:1"
    reference = f"{relay.address}/{name}"
    first = push(registry, name=name)
    async with bench.running() as (_, link):
        old = bench.sandbox(image=reference)
        await bench.launch(link, old)
        second = push(registry, name=name)
        same = bench.sandbox(image=reference)
        await bench.launch(link, same)
        assert bench.container(same.id, "sandbox")["Image"] == first.image_id
        await delete(link, same)
    async with bench.running(image_pull_policy="always") as (_, link):
        new = bench.sandbox(image=reference)
        assert ready(await bench.launch(link, new)).status == "True"
        assert bench.container(new.id, "sandbox")["Image"] == second.image_id
        assert bench.container(old.id, "sandbox")["Image"] == first.image_id
        await delete(link, old, new)


async def test_never_asks_no_registry_and_refuses_what_is_not_here(
    registry: ImageRegistry, relay: RegistryRelay, bench: DriverBench
) -> None:
    image = push(registry)
    async with bench.running(image_pull_policy="never") as (_, link):
        wanted = bench.sandbox(image=f"{relay.address}/{image.name}")
        for call in (
            link.stub.ValidateSandboxCreate(pb.ValidateSandboxCreateRequest(sandbox=wanted)),
            link.stub.CreateSandbox(pb.CreateSandboxRequest(sandbox=wanted)),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert "image_pull_policy is 'never'" in (refused.value.details() or "")
    assert relay.asked == []


async def test_creates_of_one_image_at_once_share_one_pull(
    registry: ImageRegistry, relay: RegistryRelay, bench: DriverBench
) -> None:
    image = push(registry, noise_bytes=2 * MIB)
    relay.hold = "/blobs/"
    async with bench.running() as (_, link):
        wanted = [bench.sandbox(image=f"{relay.address}/{image.name}") for _ in range(3)]
        for sandbox in wanted:
            await create(link, sandbox)
        await relay.held.wait()
        for sandbox in wanted:
            await link.wait(
                lambda event, sandbox=sandbox: (  # type: ignore[misc]
                    event.platform_event.sandbox_id == sandbox.id and event.platform_event.event.reason == "Pulling"
                )
            )
        relay.let_go()
        for sandbox in wanted:
            assert ready(await link.wait_ready(sandbox.id)).status == "True"
            told = reasons(link, sandbox)
            assert told.count("Pulling") == told.count("Pulled") == 1
            assert "PullingLayer" in told
        assert relay.count("GET", "/manifests/") == 1
        for layer in image.layers:
            assert relay.count("GET", layer) == 1
        await delete(link, *wanted)


async def test_one_who_goes_away_takes_the_pull_from_nobody(
    registry: ImageRegistry, relay: RegistryRelay, bench: DriverBench
) -> None:
    image = push(registry, noise_bytes=MIB)
    relay.hold = image.layers[1]
    async with bench.running() as (_, link):
        leaves, stays = (bench.sandbox(image=f"{relay.address}/{image.name}") for _ in range(2))
        await create(link, leaves)
        await create(link, stays)
        await relay.held.wait()
        await delete(link, leaves)
        relay.let_go()
        assert ready(await link.wait_ready(stays.id)).status == "True"
        assert relay.count("GET", image.layers[1]) == 1
        assert "Pulled" not in reasons(link, leaves)
        await delete(link, stays)


async def test_the_last_one_who_goes_away_ends_the_pull(
    registry: ImageRegistry, relay: RegistryRelay, bench: DriverBench
) -> None:
    # An engine that is told to stop notices it at the next bytes of the layer, so these keep coming, slowly.
    image = push(registry, noise_bytes=16 * MIB)
    relay.trickle = image.layers[1]
    async with bench.running() as (_, link):
        both = [bench.sandbox(image=f"{relay.address}/{image.name}") for _ in range(2)]
        for sandbox in both:
            await create(link, sandbox)
        await relay.held.wait()
        await delete(link, *both)
        async with asyncio.timeout(60.0):
            await relay.left.wait()
        assert relay.count("GET", image.layers[1]) == 1


async def test_a_layer_that_is_cut_off_is_a_failure_with_words(
    registry: ImageRegistry, relay: RegistryRelay, bench: DriverBench, docker_client: APIClient
) -> None:
    image = push(registry, noise_bytes=4 * MIB)
    relay.cut, relay.cut_after_bytes = image.layers[1], MIB
    async with bench.running() as (_, link):
        wanted = bench.sandbox(image=f"{relay.address}/{image.name}")
        await create(link, wanted)
        text = failure(await link.wait_ready(wanted.id, seconds=120.0))
        assert text.startswith(f"image {relay.address}/{image.name} could not be pulled: ")
        assert len(text) > len(f"image {relay.address}/{image.name} could not be pulled: ") + 5
        assert reasons(link, wanted)[-1] == "ImagePullFailed"
        assert "Pulled" not in reasons(link, wanted)
        assert bench.sandbox_left_over(wanted.id) == []
        assert docker_client.images(name=f"{relay.address}/{image.repository}") == []
        await delete(link, wanted)


async def test_a_tag_that_is_not_there_fails_with_the_registrys_words(
    registry: ImageRegistry, relay: RegistryRelay, bench: DriverBench
) -> None:
    image = push(registry)
    async with bench.running() as (_, link):
        wanted = bench.sandbox(image=f"{relay.address}/{image.repository}:absent")
        text = failure(await bench.launch(link, wanted))
        assert f"{relay.address}/{image.repository}:absent" in text
        assert "manifest unknown" in text
        assert "login" not in text
        await delete(link, wanted)


async def test_field_report_50_an_image_for_another_processor_is_refused_before_a_container_is_made(
    registry: ImageRegistry, relay: RegistryRelay, bench: DriverBench, docker_client: APIClient
) -> None:
    engine = docker_client.version()["Arch"]
    foreign = "s390x" if engine != "s390x" else "amd64"
    name = f"w{secrets.token_hex(6)}:1"
    registry.push(name, [workload_layer(secrets.token_hex(8))], config=USER, architecture=foreign)
    async with bench.running() as (_, link):
        wanted = bench.sandbox(image=f"{relay.address}/{name}")
        observed = ready(await bench.launch(link, wanted))
        assert observed.reason == "ImagePlatformMismatch"
        assert "does not match the specified platform" in observed.message
        assert f"linux/{foreign}" in observed.message
        assert f"linux/{engine}" in observed.message
        assert "Created" not in reasons(link, wanted)
        await delete(link, wanted)
        # Now that it is here, nothing needs to be pulled to know it.
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await link.stub.ValidateSandboxCreate(pb.ValidateSandboxCreateRequest(sandbox=wanted))
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "does not match the specified platform" in (refused.value.details() or "")


async def test_what_is_no_reference_is_refused_at_once(bench: DriverBench) -> None:
    async with bench.running() as (_, link):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await create(link, bench.sandbox(image="Not/A:reference:x"))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "image reference" in (refused.value.details() or "")
