"""The four processes on a real engine: gateway, driver, supervisor, runtime."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from scripted.stack import Stack, running_stack

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from docker import APIClient


@pytest.fixture
async def stack(
    docker_host: str, docker_client: APIClient, workload_image: str, runtime_image: str, supervisor_image: str
) -> AsyncIterator[Stack]:
    """Both processes running; what a deleted sandbox leaves behind fails the test."""
    images = {"workload": workload_image, "runtime": runtime_image, "supervisor": supervisor_image}
    async with running_stack(docker_host, docker_client, images) as running:
        yield running
