"""Load built images into an engine and take them out again.

Several runs may use one engine at the same time. Each holds a shared lock on what it uses; the last to let go untags,
and only what one of them had loaded: tags that were there before stay. The locks are the kernel's, so a killed run
holds nothing, and the next run that ends well tidies up after it.
"""

from __future__ import annotations

import fcntl
import re
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING

import docker.errors
import requests

from devtools.images.build import BuiltImage, ImageSet
from devtools.images.cache import ArtifactCache, cache_folder
from devtools.images.errors import LoadError
from devtools.images.progress import SilentProgress

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import docker

    from devtools.images.progress import ImageProgress

_PIECE_BYTES = 1 << 20


@dataclass(slots=True, kw_only=True)
class LoadedImages:
    """What one run uses in one engine; give it to `unload_images`.

    Attributes:
        images: The images, all present in the engine.
        engine: The engine's own ID.
        leases: Locks held while in use.
    """

    images: tuple[BuiltImage, ...]
    engine: str
    cache: ArtifactCache = field(repr=False)
    leases: dict[str, IO[bytes]] = field(default_factory=dict, repr=False)


def load_images(
    client: docker.APIClient,
    images: ImageSet | Sequence[BuiltImage],
    progress: ImageProgress | None = None,
    *,
    cache: ArtifactCache | None = None,
) -> LoadedImages:
    """Make images present in an engine, under their references.

    Args:
        client: The engine.
        images: What to load.
        progress: Is told of the bytes sent.
        cache: Where the locks lie; the user's cache folder when left out.

    Raises:
        LoadError: when the engine does not answer or does not take an image. What was loaded is taken out again.
    """
    wanted = images.all if isinstance(images, ImageSet) else tuple(images)
    store = cache or ArtifactCache(cache_folder() / "images")
    try:
        engine = _file_name(str(client.info().get("ID") or client.base_url))
    except (docker.errors.DockerException, requests.RequestException) as error:
        raise LoadError(f"the engine does not answer, so no image can be loaded: {error}") from error
    loaded = LoadedImages(images=wanted, engine=engine, cache=store)
    with ExitStack() as undo:
        undo.callback(unload_images, client, loaded)
        for image in wanted:
            _acquire(client, loaded, image, progress or SilentProgress())
        undo.pop_all()
    return loaded


def unload_images(client: docker.APIClient, loaded: LoadedImages) -> list[str]:
    """Let go of images, and untag those that nobody uses any more and that were not in the engine before.

    Args:
        client: The engine.
        loaded: What `load_images` answered. It is empty afterwards.

    Returns:
        The references that were untagged.

    Raises:
        LoadError: when the engine does not untag an image.
    """
    untagged: list[str] = []
    failures: list[str] = []
    with loaded.cache.locked(f"engine-{loaded.engine}"):
        while loaded.leases:
            loaded.leases.popitem()[1].close()
        # Not only ours: what a killed run left is untagged here too.
        for marker in sorted(loaded.cache.root.glob(f"loaded-{loaded.engine}-*")):
            reference = marker.read_text("utf-8")
            with _lease(loaded, reference) as lease:
                try:
                    fcntl.flock(lease, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                try:
                    if reference:  # It is empty where a run was killed before it loaded anything.
                        client.remove_image(reference)
                        untagged.append(reference)
                except docker.errors.NotFound:
                    pass
                except (docker.errors.DockerException, requests.RequestException) as error:
                    failures.append(f"{reference}: {error}")
                    continue
                marker.unlink(missing_ok=True)
    if failures:
        raise LoadError(f"the engine did not untag {'; '.join(failures)}")
    return untagged


def keep_images(loaded: LoadedImages) -> None:
    """Let go of images and leave them in the engine, as if they had been there before."""
    with loaded.cache.locked(f"engine-{loaded.engine}"):
        while loaded.leases:
            reference, lease = loaded.leases.popitem()
            lease.close()
            _marker(loaded, reference).unlink(missing_ok=True)


@contextmanager
def images_in_engine(
    client: docker.APIClient,
    images: ImageSet | Sequence[BuiltImage],
    progress: ImageProgress | None = None,
    *,
    cache: ArtifactCache | None = None,
) -> Iterator[LoadedImages]:
    """Have images in an engine for as long as the context lasts; see `load_images` and `unload_images`."""
    loaded = load_images(client, images, progress, cache=cache)
    try:
        yield loaded
    finally:
        unload_images(client, loaded)


def _acquire(client: docker.APIClient, loaded: LoadedImages, image: BuiltImage, progress: ImageProgress) -> None:
    """Lock one image for use, and load it where the engine has it not."""
    with loaded.cache.locked(f"engine-{loaded.engine}"):
        lease = _lease(loaded, image.reference)
        # Cannot wait: an exclusive lock on a lease is only ever tried while the engine's lock is held.
        fcntl.flock(lease, fcntl.LOCK_SH)
        loaded.leases[image.reference] = lease
        try:
            if _is_present(client, image.reference):
                return
            # The marker first: a run that is killed while loading leaves a tag that the next one takes for its own.
            _marker(loaded, image.reference).write_text(image.reference, "utf-8")
            _send(client, image, progress)
            if not _is_present(client, image.reference):
                raise LoadError(f"the engine took the archive of {image.reference}, but does not know that image")
        except (docker.errors.DockerException, requests.RequestException, OSError) as error:
            raise LoadError(f"{image.reference} could not be loaded into the engine: {error}") from error


def _lease(loaded: LoadedImages, reference: str) -> IO[bytes]:
    return (loaded.cache.root / "locks" / f"lease-{loaded.engine}-{_file_name(reference)}").open("ab")


def _marker(loaded: LoadedImages, reference: str) -> Path:
    return loaded.cache.root / f"loaded-{loaded.engine}-{_file_name(reference)}"


def _file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", text)


def _is_present(client: docker.APIClient, reference: str) -> bool:
    try:
        client.inspect_image(reference)  # type: ignore[no-untyped-call]  # the stubs leave it open
    except docker.errors.ImageNotFound:
        return False
    return True


def _send(client: docker.APIClient, image: BuiltImage, progress: ImageProgress) -> None:
    step = f"load {image.reference}"
    progress.started(step, image.archive_path.stat().st_size)

    def pieces() -> Iterator[bytes]:
        with image.archive_path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                progress.advanced(step, len(piece))
                yield piece

    for message in client.load_image(pieces(), quiet=True):  # type: ignore[no-untyped-call]  # as above
        if isinstance(message, dict) and (refusal := message.get("error")):
            raise LoadError(f"{image.reference} could not be loaded into the engine: {refusal}")
    progress.finished(step)
