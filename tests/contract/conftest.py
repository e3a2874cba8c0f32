"""The driver under a gateway that plays by the contract: in the test's process, and as a process of its own."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
from scripted import stub_images
from scripted.deployment import Deployment, Place, Served
from scripted.driver_bench import make_bench

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from docker import APIClient


@pytest.fixture(scope="module")
def stubs_client(docker_host: str) -> Iterator[APIClient]:
    """A client of the engine for a whole module."""
    import docker

    client = docker.APIClient(base_url=docker_host, version="auto", timeout=60)
    yield client
    client.close()


@pytest.fixture(scope="module")
def stubs(stubs_client: APIClient) -> Iterator[stub_images.StubImages]:
    """The stand-in images, loaded once."""
    images = stub_images.build(stubs_client, secrets.token_hex(4))
    yield images
    stub_images.remove(stubs_client, images)


def _deployment(
    docker_host: str, client: APIClient, stubs: stub_images.StubImages, place: Place
) -> Iterator[Deployment]:
    bench = make_bench(docker_host, client, stubs)
    yield Deployment(bench=bench, place=place)
    left = bench.left_over()
    bench.clear()
    assert left == [], "nothing may be left when the last driver has ended in good order"


@pytest.fixture(scope="module", params=list(Place), ids=str)
def shared_deployment(
    request: pytest.FixtureRequest, docker_host: str, stubs_client: APIClient, stubs: stub_images.StubImages
) -> Iterator[Deployment]:
    """Where the driver of a whole module runs."""
    yield from _deployment(docker_host, stubs_client, stubs, request.param)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(shared_deployment: Deployment) -> AsyncIterator[Served]:
    """One driver for a whole module; each test deletes what it created."""
    async with shared_deployment.serving() as served:
        yield served


@pytest.fixture(params=list(Place), ids=str)
def deployment(
    request: pytest.FixtureRequest, docker_host: str, stubs_client: APIClient, stubs: stub_images.StubImages
) -> Iterator[Deployment]:
    """Where the drivers of one test run."""
    yield from _deployment(docker_host, stubs_client, stubs, request.param)
