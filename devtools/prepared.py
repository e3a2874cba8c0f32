"""An engine with the reference images in it, left as it was found."""

from __future__ import annotations

import os
import secrets
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import docker
import docker.errors
from rich.console import Console

from devtools import debian
from devtools.console import say
from devtools.engine import an_engine
from devtools.engine_discovery import find_engine
from devtools.environment import child_environment
from devtools.errors import PreconditionError, StepFailedError
from devtools.images import (
    BuildInputError,
    ImageError,
    ImageSet,
    TerminalProgress,
    keep_images,
    load_images,
    unload_images,
)
from devtools.images import build_images as build_image_set
from devtools.images.build import REPOSITORY
from devtools.images.busybox import find_busybox
from devtools.images.cache import cache_folder
from devtools.inventory import Inventory, differences

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from devtools.engine import Engine
    from devtools.images import ImageProgress

BUSYBOX_PACKAGE = "busybox-static"
_CLIENT_VARIABLES = ("DOCKER_CONTEXT", "DOCKER_TLS", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH", "DOCKER_API_VERSION")
_API_TIMEOUT_SECONDS = 120


@dataclass(slots=True, kw_only=True)
class Prepared:
    """An engine that holds the images.

    Attributes:
        engine: The engine.
        images: The images in it.
        run: A word that names this run, for labels.
        changes: What differs on the engine from before; filled when the block is left.
    """

    engine: Engine
    images: ImageSet
    run: str
    changes: list[str] = field(default_factory=list)

    def environment(self) -> dict[str, str]:
        """The whole environment for a command that uses the engine and the images."""
        variables = {name: value for name, value in child_environment().items() if name not in _CLIENT_VARIABLES}
        variables["DOCKER_HOST"] = self.engine.address
        variables["OPENSHELL_TEST_RUN"] = self.run
        variables["PATH"] = f"{_busybox_folder()}{os.pathsep}{variables['PATH']}"
        return variables | self.images.environment()


def writable_cache() -> Path:
    """The cache folder, made where it is missing.

    Raises:
        PreconditionError: Nothing can be written there.
    """
    folder = cache_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise PreconditionError(
            f"the cache folder {folder} cannot be written: {error.strerror}.\n"
            "What to do: name another one in OPENSHELL_CACHE_DIR."
        ) from error
    return folder


def build_images() -> ImageSet:
    """Build the images, or find them in the cache.

    Raises:
        PreconditionError: The cache folder cannot be written.
        StepFailedError: An image cannot be built; the text says why.
    """
    writable_cache()
    say("building the images, or finding them in the cache")
    try:
        with TerminalProgress(Console(stderr=True)) as progress:
            return _build_with_known_packages(progress)
    except ImageError as error:
        raise StepFailedError(f"the images cannot be built: {error}") from error


def load_into_engine(images: ImageSet) -> None:
    """Load images into the engine that answers, and leave them there.

    Raises:
        PreconditionError: No engine answers; none is started, since it would end with this command.
        StepFailedError: The engine does not take them.
    """
    found = find_engine(os.environ)
    if found.address is None:
        raise PreconditionError(
            f"no Docker Engine answers to load the images into: {found.explanation}.\n"
            "What to do: start one, or name its socket in DOCKER_HOST, as in DOCKER_HOST=unix:///run/docker.sock."
        )
    say(f"loading the images into the Docker Engine at {found.address} ({found.origin})")
    try:
        client = docker.APIClient(base_url=found.address, version="auto", timeout=_API_TIMEOUT_SECONDS)
        try:
            with TerminalProgress(Console(stderr=True)) as progress:
                keep_images(load_images(client, images, progress))
        finally:
            client.close()
    except (ImageError, docker.errors.DockerException, OSError) as error:
        raise StepFailedError(f"the engine at {found.address} did not take the images: {error}") from error


def _busybox_folder() -> Path:
    """A folder whose ``busybox`` is the static one of the workload image, for tests that make images of their own."""
    folder = cache_folder() / "programs"
    folder.mkdir(parents=True, exist_ok=True)
    program, link = find_busybox(cache_folder() / "images"), folder / "busybox"
    if not link.is_symlink() or link.readlink() != program:
        fresh = folder / f"busybox-{os.getpid()}"
        fresh.symlink_to(program)
        fresh.replace(link)
    return folder


def _build_with_known_packages(progress: ImageProgress) -> ImageSet:
    """Build, and where an input from the distribution is missing because no package list was ever read, once more."""
    try:
        return build_image_set(progress)
    except BuildInputError:
        if not debian.read_lists_for(BUSYBOX_PACKAGE, log=cache_folder() / "apt.log"):
            raise
        return build_image_set(progress)


@contextmanager
def prepared_engine(*, is_shared: bool = False) -> Iterator[Prepared]:
    """Have an engine with the images in it for the block, and look afterwards whether it is as it was before.

    Args:
        is_shared: Others use the engine meanwhile, so look only for what carries this run's label.

    Raises:
        PreconditionError: There is no engine and no way to have one.
        StepFailedError: An image cannot be built, loaded or untagged.
        EngineFailedError: The private engine did not start.
    """
    with an_engine(writable_cache()) as engine:
        images = build_images()
        client = docker.APIClient(base_url=engine.address, version="auto", timeout=_API_TIMEOUT_SECONDS)
        try:
            prepared = Prepared(engine=engine, images=images, run=secrets.token_hex(6))
            if engine.is_private:
                _sweep(client, images)
            only = prepared.run if is_shared else None
            before = Inventory.of(client, only)
            try:
                with _loaded(client, prepared):
                    yield prepared
            finally:
                prepared.changes += _changes(client, before, only, images)
        except (docker.errors.DockerException, OSError) as error:
            raise StepFailedError(f"the engine at {engine.address} failed: {error}") from error
        finally:
            client.close()


@contextmanager
def _loaded(client: docker.APIClient, prepared: Prepared) -> Iterator[None]:
    say("loading the images into the engine, where it has them not")
    try:
        with TerminalProgress(Console(stderr=True)) as progress:
            loaded = load_images(client, prepared.images, progress)
        try:
            yield
        finally:
            if prepared.engine.is_private:
                keep_images(loaded)
            else:
                unload_images(client, loaded)
    except ImageError as error:
        raise StepFailedError(str(error)) from error


def _changes(client: docker.APIClient, before: Inventory, only: str | None, images: ImageSet) -> list[str]:
    try:
        found = differences(before, Inventory.of(client, only))
    except (docker.errors.DockerException, OSError) as error:
        found = [f"the engine no longer answers, so nothing is known of what was left: {error}"]
    own_tags = {image.reference for image in images.all}
    found = [change for change in found if not any(f"tag {tag} " in change for tag in own_tags)]
    for change in found:
        say(f"the engine is not as it was before: {change}")
    return found


def _sweep(client: docker.APIClient, images: ImageSet) -> None:
    """Empty the private engine of what an interrupted run left, and of images of an earlier state of the sources."""
    removed: list[str] = []
    for container in client.containers(all=True):
        client.remove_container(container["Id"], force=True, v=True)
        removed.append(f"container {container['Id'][:12]}")
    for volume in client.volumes()["Volumes"] or []:
        client.remove_volume(volume["Name"], force=True)
        removed.append(f"volume {volume['Name']}")
    for network in client.networks():
        if network["Name"] not in {"bridge", "host", "none"}:
            client.remove_network(network["Id"])
            removed.append(f"network {network['Name']}")
    current = {image.reference for image in images.all}
    for image in client.images():
        for tag in image.get("RepoTags") or []:
            if tag.startswith(f"{REPOSITORY}/") and tag not in current:
                client.remove_image(tag, force=True)
    if removed:
        say(f"removed from the private engine what an interrupted run left: {', '.join(removed)}")
