"""Images that are wrong on purpose, for tests of what a driver makes of them.

Each function answers a recipe; `build_test_image` makes an image of it. They hold no Python, so they are built in
milliseconds.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from devtools.images.archive import Entry, ImageConfig, directory
from devtools.images.build import BuiltImage, ImageBuilder
from devtools.images.busybox import find_busybox
from devtools.images.cache import ArtifactCache, cache_folder
from devtools.images.layout import (
    SUPERVISOR_ENTRY,
    SUPERVISOR_USER,
    ImageRecipe,
    Role,
    files_layer,
    labels,
    supervisor_root_layer,
    workload_layer,
    workload_recipe,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def _busybox() -> Path:
    return find_busybox(ArtifactCache(cache_folder() / "images").root)


_VERSION = "0.0.0"
_REVISION = "unknown"


def build_test_image(
    recipe: ImageRecipe, *, cache: ArtifactCache, extra_labels: Mapping[str, str] | None = None
) -> BuiltImage:
    """Build an image for a test.

    Args:
        recipe: What to build.
        cache: Where its archive lies; a temporary folder of the test.
        extra_labels: Added to its labels, for example to find and remove it afterwards.
    """
    config = dataclasses.replace(recipe.config, labels={**recipe.config.labels, **(extra_labels or {})})
    return ImageBuilder(cache).image(dataclasses.replace(recipe, config=config))


def without_binary(role: Role) -> ImageRecipe:
    """An image that says it is the runtime or the supervisor and lacks the executable."""
    layer = files_layer(f"empty-{role.value}", [directory(".openshell/runtime"), directory("tmp", mode=0o1777)])
    config = ImageConfig(user=SUPERVISOR_USER, labels=labels(role, _VERSION, _REVISION))
    return ImageRecipe(name=f"test-{role.value}-without-binary", layers=(layer,), config=config)


def not_executable(role: Role, path: str) -> ImageRecipe:
    """An image whose executable is a text that no kernel runs.

    Args:
        role: What it says it is.
        path: Where the executable lies, absolute.
    """
    entry = Entry(path=path.removeprefix("/"), mode=0o444, content=b"this is no program\n")
    layer = files_layer(f"unusable-{role.value}", [entry])
    config = ImageConfig(user=SUPERVISOR_USER, labels=labels(role, _VERSION, _REVISION))
    return ImageRecipe(name=f"test-{role.value}-not-executable", layers=(layer,), config=config)


def supervisor_stub(name: str, body: str, *, health_exit_code: int = 1) -> ImageRecipe:
    """A supervisor that is a few lines of shell.

    Args:
        name: Tells it from other stubs; in the reference.
        body: What it does, as commands of ``sh``; for example ``echo sorry >&2; exit 3``. It is PID 1, so it cannot
            kill itself; let it wait (``exec sleep 3600``) and kill it from outside.
        health_exit_code: What ``/openshell-supervisor health …`` exits with.
    """
    script = f'#!/bin/sh\nif [ "$1" = health ]; then exit {health_exit_code}; fi\n{body}\n'
    stub = files_layer("supervisor-stub", [Entry(path=SUPERVISOR_ENTRY[1:], mode=0o555, content=script.encode())])
    shell = workload_layer(_busybox(), accounts=False)
    return ImageRecipe(
        name=f"test-supervisor-{name}",
        layers=(shell, supervisor_root_layer(), stub),
        config=ImageConfig(
            user=SUPERVISOR_USER,
            entrypoint=(SUPERVISOR_ENTRY,),
            environment={"PATH": "/bin"},
            labels=labels(Role.SUPERVISOR, _VERSION, _REVISION),
        ),
    )


def _workload(name: str, *, accounts: bool = True, user: str = "sandbox", architecture: str = "") -> ImageRecipe:
    recipe = workload_recipe(_busybox(), labels(Role.WORKLOAD, _VERSION, _REVISION))
    return dataclasses.replace(
        recipe,
        name=f"test-workload-{name}",
        layers=(workload_layer(_busybox(), accounts=accounts),),
        config=dataclasses.replace(recipe.config, user=user, architecture=architecture),
    )


def workload_without_user() -> ImageRecipe:
    """A workload image whose configuration names no user."""
    return _workload("without-user", user="")


def workload_with_user(user: str) -> ImageRecipe:
    """A workload image whose configuration names another user than ``sandbox``."""
    return _workload("with-user", user=user)


def workload_without_accounts(user: str = "1000:1000") -> ImageRecipe:
    """A workload image without ``/etc/passwd`` and ``/etc/group``, as distroless images are."""
    return _workload("without-accounts", accounts=False, user=user)


def workload_of_architecture(architecture: str) -> ImageRecipe:
    """A workload image that says it is for another architecture."""
    return _workload("of-architecture", architecture=architecture)


def empty_folder_image() -> ImageRecipe:
    """An image that holds one empty folder and nothing else: no shell, no libc, no accounts."""
    layer = files_layer("empty-folder", [directory("empty")])
    config = ImageConfig(labels=labels(Role.WORKLOAD, _VERSION, _REVISION))
    return ImageRecipe(name="test-empty-folder", layers=(layer,), config=config)
