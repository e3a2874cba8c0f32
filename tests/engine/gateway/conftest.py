"""The whole of it on a real engine: gateway, driver, supervisor, runtime."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from scripted.stack import Stack

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from docker import APIClient


@pytest.fixture
async def stack(
    docker_host: str, docker_client: APIClient, workload_image: str, runtime_image: str, supervisor_image: str
) -> AsyncIterator[Stack]:
    """Both processes running; what a deleted sandbox leaves behind fails the test."""
    images = {"workload": workload_image, "runtime": runtime_image, "supervisor": supervisor_image}
    # Not pytest's folder: the path of a Unix socket must be short.
    with tempfile.TemporaryDirectory(prefix="stack-") as folder:
        running = Stack(Path(folder), docker_host, docker_client, images)
        try:
            await running.start()
            yield running
        finally:
            await running.close()
            left = running.left_over()
            running.clear()
        assert left == []
