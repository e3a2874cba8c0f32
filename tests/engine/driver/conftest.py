"""Fixtures of the driver's tests on a real engine."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import pytest
from scripted import stub_images
from scripted.driver_bench import DriverBench, make_bench

if TYPE_CHECKING:
    from collections.abc import Iterator

    from docker import APIClient


@pytest.fixture(scope="session")
def stubs(docker_host: str) -> Iterator[stub_images.StubImages]:
    """The stand-in images, loaded once."""
    import docker

    client = docker.APIClient(base_url=docker_host, version="auto", timeout=60)
    images = stub_images.build(client, secrets.token_hex(4))
    yield images
    stub_images.remove(client, images)
    client.close()


@pytest.fixture
def bench(docker_host: str, docker_client: APIClient, stubs: stub_images.StubImages) -> Iterator[DriverBench]:
    """A bench; nothing of it may be left when its last driver has ended in good order."""
    made = make_bench(docker_host, docker_client, stubs)
    yield made
    left = made.left_over()
    made.clear()
    assert left == []
