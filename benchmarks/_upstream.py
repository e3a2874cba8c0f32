"""The engine calls of upstream's Docker driver, replayed with docker-py.

In the order of compute-driver contract 5.4 to 5.8, each after the other as there: look for an existing container,
inspect the images, read the accounts from a container that never starts, make volumes and workload, inspect it, upload
its files with the runtime's binary among them, start it, stage the supervisor's files through a second container that
never starts, create and start the supervisor. Everything that is not a call of the engine (its own files, keys,
documents, checks) is left out, so the replay is a lower bound of what that driver needs.
"""

from __future__ import annotations

import io
import os
import secrets
import tarfile
import time
from typing import TYPE_CHECKING, Any, Final

from benchmarks import _by_hand
from driver_docker.staging import SUPERVISOR_ARCHIVE_ROOT, WORKLOAD_ARCHIVE_ROOT

if TYPE_CHECKING:
    import docker

PUBLISHED_BINARY_BYTES: Final = 25 << 20
"""Size of upstream's own runtime. Its release 0.0.111 has it as a compressed archive of 10.8 MB for x86_64, and Rust
programs pack to about two fifths of their size; later releases have grown."""
_ACCOUNT_FILES: Final = ("/etc/passwd", "/etc/group")
_RUNTIME_BINARY: Final = ".openshell/openshell-sandbox"
"""Beside the place where our workloads have their runtime, which is a volume that cannot be written."""


def make(
    client: docker.APIClient,
    recipe: _by_hand.Recipe,
    images: tuple[str, str, str],
    made: _by_hand.Made,
    *,
    runtime_bytes: int,
) -> None:
    """Make both containers as upstream's driver does.

    Args:
        client: The engine.
        recipe: The two containers.
        images: References of the workload's, the runtime's and the supervisor's image.
        made: What exists is noted here as it comes into being.
        runtime_bytes: Size of the runtime, which upstream's driver uploads into each workload as one binary.
    """
    token = secrets.token_hex(4)
    workload, supervisor, volumes = _by_hand.renamed(recipe, token)
    archive = with_runtime(recipe.workload_tar, runtime_bytes)
    made.began = time.monotonic_ns()
    client.containers(all=True, filters={"label": f"{_by_hand.LABEL_PREFIX}sandbox-id={token}"})
    for image in images:
        client.inspect_image(image)  # type: ignore[no-untyped-call]
    _read_accounts(client, workload["Image"], token, made)
    for name in volumes:
        client.create_volume(name, labels=workload["Labels"])
        made.volumes = (*made.volumes, name)
    made.workload_id = _by_hand.create(client, workload, f"openshell-hand-{token}")
    client.inspect_container(made.workload_id)
    client.put_archive(made.workload_id, WORKLOAD_ARCHIVE_ROOT, archive)
    client.start(made.workload_id)
    staging = _by_hand.create(client, _never_started(supervisor), f"openshell-hand-{token}-staging")
    made.others.append(staging)
    client.put_archive(staging, SUPERVISOR_ARCHIVE_ROOT, recipe.supervisor_tar)
    client.remove_container(made.others.pop(), force=True)
    made.supervisor_id = _by_hand.create(client, supervisor, f"openshell-hand-{token}-supervisor")
    client.start(made.supervisor_id)


def with_runtime(tar: bytes, size: int) -> bytes:
    """An archive with one binary added; its content cannot be compressed, as that of real ones."""
    buffer = io.BytesIO(tar)
    with tarfile.open(fileobj=buffer, mode="a") as archive:
        entry = tarfile.TarInfo(_RUNTIME_BINARY)
        entry.size, entry.mode = size, 0o555
        archive.addfile(entry, io.BytesIO(os.urandom(size)))
    return buffer.getvalue()


def _read_accounts(client: docker.APIClient, image: str, token: str, made: _by_hand.Made) -> None:
    body = {"Image": image, "Cmd": ["/none"], "NetworkDisabled": True}
    made.others.append(_by_hand.create(client, body, f"openshell-hand-{token}-identity"))
    for path in _ACCOUNT_FILES:
        stream, _ = client.get_archive(made.others[-1], path)
        for _ in stream:
            pass
    client.remove_container(made.others.pop(), force=True)


def _never_started(supervisor: dict[str, Any]) -> dict[str, Any]:
    """The staging container: the supervisor's volumes, writable, and its user."""
    keys = ("Image", "User", "Entrypoint", "Cmd", "Labels")
    host = supervisor["HostConfig"]
    mounts = [{**mount, "ReadOnly": False} for mount in host.get("Mounts") or ()]
    binds = [bind.removesuffix(":ro") for bind in host.get("Binds") or ()]
    return {key: supervisor[key] for key in keys if key in supervisor} | {
        "HostConfig": {"NetworkMode": "none", "Mounts": mounts, "Binds": binds}
    }
