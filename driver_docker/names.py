"""Names of containers and volumes, as compute-driver contract 5.1 has them. Pure.

Every name is valid for the engine (``[a-zA-Z0-9][a-zA-Z0-9_.-]+``), a function of its inputs alone, and different for
different sandbox ids. Names are for people and for the engine's uniqueness check; the driver finds things by labels.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

MAX_CONTAINER_NAME_CHARS: Final = 200
"""Longest name of a workload container; its helpers append a suffix to it."""

_FOREIGN: Final = re.compile(r"[^a-z0-9_.-]", re.ASCII)
_UUID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\Z", re.ASCII)
_MAX_PART_CHARS: Final = 64
_HASH_CHARS: Final = 32


def workload_container_name(*, workspace: str, name: str, sandbox_id: str) -> str:
    """Return the name of a sandbox's workload container.

    ``openshell-{workspace}--{name}-{id}``, of which only the name part is shortened; a name of which nothing is left
    makes it ``openshell-{workspace}---{id}``. A gateway's ids are UUIDs. For any other id, and for a workspace so long
    that the whole could not fit, a part is shortened and a digest of the exact inputs is added, so that no two
    sandboxes ever meet in one name.
    """
    workspace_part = _sanitised(workspace)
    id_part = _sanitised(sandbox_id)
    if not _UUID.match(sandbox_id):
        id_part = f"{id_part[:_MAX_PART_CHARS]}-{_digest(sandbox_id)[:12]}".lstrip("-")
    if len(f"openshell-{workspace_part}---{id_part}") > MAX_CONTAINER_NAME_CHARS:
        workspace_part = f"{workspace_part[:_MAX_PART_CHARS]}-{_digest(workspace)[:12]}"
    room = MAX_CONTAINER_NAME_CHARS - len(f"openshell-{workspace_part}---{id_part}")
    name_part = _sanitised(name)[:room].rstrip("-._")
    return f"openshell-{workspace_part}--{name_part}-{id_part}"


def supervisor_container_name(workload_name: str) -> str:
    """Return the name of the supervisor beside a workload container."""
    return f"{workload_name}-supervisor"


def staging_container_name(workload_name: str) -> str:
    """Return the name of the never-started container that stages a supervisor's files."""
    return f"{workload_name}-supervisor-stage"


def identity_container_name(workload_name: str) -> str:
    """Return the name of the never-started container from which an image's accounts are read."""
    return f"{workload_name}-identity"


def channel_volume_name(*, namespace: str, sandbox_id: str) -> str:
    """Return the name of the volume that carries the control channel."""
    return f"openshell-channel-{_digest(namespace, sandbox_id)[:_HASH_CHARS]}"


def supervisor_volume_name(*, namespace: str, sandbox_id: str) -> str:
    """Return the name of the volume with the supervisor's files."""
    return f"openshell-supervisor-{_digest(namespace, sandbox_id)[:_HASH_CHARS]}"


def runtime_volume_name(*, namespace: str, image_id: str) -> str:
    """Return the name of the volume with the sandbox runtime of one image; all sandboxes of a namespace share it.

    Args:
        namespace: The configured sandbox label.
        image_id: Immutable id of the runtime image.
    """
    return f"openshell-runtime-{_digest(namespace, image_id)[:_HASH_CHARS]}"


def _sanitised(part: str) -> str:
    return _FOREIGN.sub("-", part.lower()).strip("-")


def _digest(*parts: str) -> str:
    # Surrogates cannot come over the wire; they are kept apart here rather than raised on.
    return hashlib.sha256(b"\0".join(part.encode("utf-8", "surrogatepass") for part in parts)).hexdigest()
