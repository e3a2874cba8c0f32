"""Build the reference images as archives, without an engine and without a registry."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from devtools.images.archive import Layer, write_archive, write_layer
from devtools.images.busybox import find_busybox
from devtools.images.cache import ArtifactCache, cache_folder
from devtools.images.interpreter import inspect_interpreter
from devtools.images.layout import (
    ROOT,
    ImageRecipe,
    LayerRecipe,
    Role,
    builder_digest,
    digest_of,
    labels,
    python_layer,
    runtime_recipe,
    supervisor_recipe,
    workload_recipe,
)
from devtools.images.progress import SilentProgress

if TYPE_CHECKING:
    from collections.abc import Mapping

    from devtools.images.progress import ImageProgress

REPOSITORY = "openshell-local"
"""The first part of every reference; no registry is ever asked for it."""

_REVISION = "org.opencontainers.image.revision"
_VISIBLE_DIGITS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltImage:
    """An image that was built.

    Attributes:
        reference: Its tag, which names its content: ``openshell-local/<name>:<12 hex>``.
        archive_path: The archive that ``docker load`` reads.
        image_id: The ID it has once loaded, ``sha256:`` and 64 hexadecimal digits.
    """

    reference: str
    archive_path: Path
    image_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSet:
    """The three reference images.

    Attributes:
        workload: The demo workload.
        runtime: The sandbox runtime.
        supervisor: The control supervisor.
    """

    workload: BuiltImage
    runtime: BuiltImage
    supervisor: BuiltImage

    @property
    def all(self) -> tuple[BuiltImage, ...]:
        """All of them, in the order in which they are loaded."""
        return (self.workload, self.runtime, self.supervisor)

    def environment(self) -> dict[str, str]:
        """The variables by which tests and demo learn the references."""
        return {
            "OPENSHELL_TEST_WORKLOAD_IMAGE": self.workload.reference,
            "OPENSHELL_TEST_RUNTIME_IMAGE": self.runtime.reference,
            "OPENSHELL_TEST_SUPERVISOR_IMAGE": self.supervisor.reference,
        }


class ImageBuilder:
    """Builds images from recipes, through the cache.

    Args:
        cache: Where layers and archives are kept; the user's cache folder when left out.
        progress: Is told of long work.
    """

    def __init__(self, cache: ArtifactCache | None = None, progress: ImageProgress | None = None) -> None:
        self._cache = cache or ArtifactCache(cache_folder() / "images")
        self._progress: ImageProgress = progress or SilentProgress()

    @property
    def cache(self) -> ArtifactCache:
        """Where the results are kept."""
        return self._cache

    def layer(self, recipe: LayerRecipe) -> Layer:
        """Find or write a layer."""

        def write(path: Path, work: Path) -> Mapping[str, str]:
            return {"diff_id": write_layer(recipe.entries(work, self._progress), path).diff_id}

        path, facts = self._cache.make(f"layer-{recipe.name}-{recipe.key[:32]}", write)
        return Layer(path=path, diff_id=facts["diff_id"], size_bytes=int(facts["size_bytes"]))

    def image(self, recipe: ImageRecipe) -> BuiltImage:
        """Find or write an image's archive.

        The image's name is a digest of everything that decides how it behaves. The revision label is not part of it:
        it tells the commit at which this content was first built here, and a commit that changes nothing of an image
        makes no new image.
        """
        key = image_key(recipe)
        name = f"image-{recipe.name}-{key[:32]}"
        reference = f"{REPOSITORY}/{recipe.name}:{key[:_VISIBLE_DIGITS]}"

        def write(path: Path, _work: Path) -> Mapping[str, str]:
            layers = [self.layer(layer) for layer in recipe.layers]
            return {
                "image_id": write_archive(reference=reference, config=recipe.config, layers=layers, path=path),
                "reference": reference,
            }

        path, facts = self._cache.make(name, write)
        self._cache.prune(f"image-{recipe.name}-")
        for layer in recipe.layers:
            self._cache.prune(f"layer-{layer.name}-")
        return BuiltImage(reference=reference, archive_path=path, image_id=facts["image_id"])


def image_key(recipe: ImageRecipe) -> str:
    """Digest what decides how an image behaves."""
    config = recipe.config
    stable_labels = {name: value for name, value in config.labels.items() if name != _REVISION}
    return digest_of(
        builder_digest(), recipe.name, [layer.key for layer in recipe.layers], config.user, config.working_directory,
        config.entrypoint, config.command, dict(config.environment), stable_labels, config.architecture,
    )  # fmt: skip


def project_version(root: Path = ROOT) -> str:
    """The project's version, from its pyproject file."""
    document = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))
    return str(document["project"]["version"])


def project_revision(root: Path = ROOT) -> str:
    """The project's commit, or ``unknown`` outside of a repository."""
    try:
        done = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip() or "unknown"


def build_images(
    progress: ImageProgress | None = None,
    *,
    cache: ArtifactCache | None = None,
    python: Path | None = None,
) -> ImageSet:
    """Build the three reference images, or find them in the cache.

    Args:
        progress: Is told of long work.
        cache: Where layers and archives are kept; the user's cache folder when left out.
        python: The interpreter that goes into the images; the one that runs this when left out.

    Raises:
        BuildInputError: when something they are made from is missing or not as locked.
        ElfError: when a binary cannot be relocated.
    """
    builder = ImageBuilder(cache, progress)
    interpreter = inspect_interpreter(python or Path(sys.executable))
    site_packages = Path(sysconfig.get_path("platlib"))
    version, revision = project_version(), project_revision()
    base = python_layer(interpreter, site_packages)
    return ImageSet(
        workload=builder.image(
            workload_recipe(find_busybox(builder.cache.root), labels(Role.WORKLOAD, version, revision))
        ),
        runtime=builder.image(runtime_recipe(base, interpreter, labels(Role.RUNTIME, version, revision))),
        supervisor=builder.image(supervisor_recipe(base, interpreter, labels(Role.SUPERVISOR, version, revision))),
    )
