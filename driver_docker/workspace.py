"""Where in the workload the agent's workspace is (compute-driver contract 5.6). Pure."""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING, Final

from driver_docker.errors import ProvisioningError
from openshell.status import StatusCode

if TYPE_CHECKING:
    from collections.abc import Iterable

DEFAULT_WORKSPACE: Final = "/sandbox"
CHANNEL_DIR: Final = "/.openshell/channel"
CONTROL_ROOTS: Final = (
    "/opt/openshell",
    "/etc/openshell",
    "/etc/openshell-tls",
    "/run/openshell",
    "/run/openshell-sidecar",
    "/run/netns",
    "/var/run/netns",
)
_KERNEL_ROOTS: Final = ("/proc", "/sys", "/dev")
_IMAGE_VOLUME_FREE: Final = (*CONTROL_ROOTS, "/.openshell", "/run/openshell-supervisor-ca")


class WorkspaceError(ProvisioningError):
    """The image's working directory cannot be the workspace."""

    default_reason = "WorkspaceValidationFailed"
    default_status = StatusCode.FAILED_PRECONDITION


def is_plain_path(path: str) -> bool:
    """Whether a path is absolute and normalised, with nothing in it that does not print.

    Two slashes in front are not plain: they may mean another place, and stand in front of none that is compared.
    """
    return (
        path.startswith("/") and not path.startswith("//") and posixpath.normpath(path) == path and path.isprintable()
    )


def overlaps(first: str, second: str) -> bool:
    """Whether one of two normalised paths is the other or lies in it."""
    return first == second or first.startswith(f"{second}/") or second.startswith(f"{first}/")


def workspace_root(working_dir: str, *, image_volumes: Iterable[str] = ()) -> str:
    """The workspace of an image.

    Args:
        working_dir: The image's `WorkingDir`.
        image_volumes: The image's `VOLUME` paths.

    Raises:
        WorkspaceError: Not absolute, not normalised, in a kernel or control directory, or covered by a volume.
    """
    root = DEFAULT_WORKSPACE if working_dir in {"", "/", DEFAULT_WORKSPACE} else working_dir
    if not is_plain_path(root):
        raise WorkspaceError(f"the image's working directory {root!r} is not an absolute, normalised path")
    for taken in (*_KERNEL_ROOTS, *CONTROL_ROOTS, CHANNEL_DIR, "/.openshell"):
        if overlaps(root, taken):
            raise WorkspaceError(
                f"the image's working directory {root} overlaps {taken}, which the sandbox needs itself"
            )
    for volume in image_volumes:
        place = posixpath.normpath(volume)
        for taken in _IMAGE_VOLUME_FREE:
            if place == taken or place.startswith(f"{taken}/"):
                raise WorkspaceError(f"the image's VOLUME {volume} lies in {taken}, which the sandbox needs itself")
        if root == place or root.startswith(f"{place}/") or place == "/":
            raise WorkspaceError(f"the image's VOLUME {volume} covers its working directory {root}")
    return root
