"""Fixtures of the pull tests: a registry, open or locked, and a relay in front of it."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import TYPE_CHECKING

import pytest
from scripted.image_registry import ImageRegistry, RegistryRelay

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from docker import APIClient


@pytest.fixture(scope="session")
def registry_program() -> Path:
    """The registry's program; without one the test is skipped."""
    from devtools.docker_registry import PACKAGE, find_registry

    found = find_registry()
    if found is None:
        pytest.skip(f"no {PACKAGE} here (./dev test fetches the Debian package of that name)")
    return found


@pytest.fixture(scope="session")
def registry(registry_program: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ImageRegistry]:
    """A registry that asks for nothing."""
    made = ImageRegistry(registry_program, tmp_path_factory.mktemp("registry"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def locked_registry(registry_program: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ImageRegistry]:
    """A registry that asks for user and password."""
    made = ImageRegistry(registry_program, tmp_path_factory.mktemp("locked-registry"), locked=True)
    yield made
    made.close()


def _remove_images(client: APIClient, address: str) -> None:
    for image in client.images():
        names = [*(image.get("RepoTags") or ()), *(image.get("RepoDigests") or ())]
        if any(name.startswith(f"{address}/") for name in names):
            client.remove_image(image["Id"], force=True)


@pytest.fixture
async def relay(registry: ImageRegistry, docker_client: APIClient) -> AsyncIterator[RegistryRelay]:
    """A relay in front of the open registry; what was pulled through it is removed."""
    async with RegistryRelay(registry.address) as made:
        yield made
        _remove_images(docker_client, made.address)


@pytest.fixture
async def locked_relay(locked_registry: ImageRegistry, docker_client: APIClient) -> AsyncIterator[RegistryRelay]:
    """A relay in front of the locked registry; what was pulled through it is removed."""
    async with RegistryRelay(locked_registry.address) as made:
        yield made
        _remove_images(docker_client, made.address)


@pytest.fixture(autouse=True)
def docker_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The docker config of the test alone; it does not exist yet."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker-config"))
    return tmp_path / "docker-config" / "config.json"


@pytest.fixture
def log_in(docker_config: Path) -> Callable[[str, str, str], None]:
    """Does what `docker login` does, with registry, user and password."""

    def write(registry: str, user: str, password: str) -> None:
        docker_config.parent.mkdir(exist_ok=True)
        entry = {"auth": b64encode(f"{user}:{password}".encode()).decode()}
        docker_config.write_text(json.dumps({"auths": {registry: entry}}), "utf-8")

    return write
