"""What a caller may mount into its workload, the rules for where, and the engine's form of it. Pure.

Rules of compute-driver contract 5.12. Nothing is repaired: a path with white space around it, a NUL or a `..` is
refused, because what is checked must be what is mounted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from driver_docker.engine_objects import TmpfsMount, VolumeMount
from driver_docker.errors import InvalidRequestError, PreconditionError, ProvisioningError
from driver_docker.identity import MAX_ID
from driver_docker.workspace import CHANNEL_DIR, CONTROL_ROOTS, is_plain_path, overlaps
from openshell.status import StatusCode

if TYPE_CHECKING:
    from collections.abc import Iterable

CONTROL_PATHS: Final = (*CONTROL_ROOTS, CHANNEL_DIR, "/.openshell", "/run/openshell-supervisor-ca", "/proc", "/sys")
"""What no mount may cover, hold or lie in: control roots, channel, runtime, the CA's folder, and what the kernel tells
the runtime about processes."""

SUBPATH_API: Final = (1, 45)
"""Older engines ignore a volume's subpath in silence and would mount the whole volume."""

MAX_MOUNTS: Final = 64
_MAX_TMPFS_MODE: Final = 0o7777
_TMPFS_FLAGS: Final = frozenset(
    {
        *("ro", "rw", "exec", "noexec", "suid", "nosuid", "dev", "nodev", "sync", "async"),
        *("atime", "noatime", "diratime", "nodiratime", "relatime", "norelatime", "strictatime", "nostrictatime"),
    }
)
_TMPFS_COUNT: Final = r"(?:0[0-7]{0,18}|[1-9][0-9]{0,18})[kKmMgGtTpPeE]?"
"""With a zero in front the kernel reads it as octal."""
_TMPFS_VALUES: Final = {
    "size": re.compile(rf"(?!0+[^0-9]?\Z)(?:{_TMPFS_COUNT}|0[0-7]{{0,4}}%|[1-9][0-9]{{0,4}}%)"),
    "mode": re.compile("0{0,8}[0-7]{1,4}"),
    "uid": re.compile("[0-9]{1,10}"),
    "gid": re.compile("[0-9]{1,10}"),
    "nr_inodes": re.compile(_TMPFS_COUNT),
    "nr_blocks": re.compile(_TMPFS_COUNT),
    "mpol": re.compile(
        r"default|local|prefer(=static|=relative)?:[0-9]{1,4}|bind(=static|=relative)?:[0-9]{1,4}(-[0-9]{1,4})?|"
        r"interleave(=static|=relative)?(:[0-9]{1,4}(-[0-9]{1,4})?)?"
    ),
}
"""What the kernel takes for each option; a size of zero is none, since to the kernel it means "unlimited"."""
_MAX_COMPONENT_BYTES: Final = 255
_MAX_PATH_BYTES: Final = 4095


class MountError(ProvisioningError):
    """A mount cannot be combined with the image that it is for; known only once the image is."""

    default_reason = "WorkspaceValidationFailed"
    default_status = StatusCode.FAILED_PRECONDITION


class SelinuxLabel(StrEnum):
    """How a bind mount's source is relabelled on a host with SELinux; the value is the engine's option."""

    SHARED = "z"
    PRIVATE = "Z"


@dataclass(frozen=True, slots=True, kw_only=True)
class BindRequest:
    """A folder or file of the host."""

    source: str
    target: str
    read_only: bool = True
    selinux: SelinuxLabel | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeRequest:
    """An existing volume of the engine."""

    source: str
    target: str
    read_only: bool = True
    subpath: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TmpfsRequest:
    """A memory file system."""

    target: str
    options: tuple[str, ...] = ()
    size_bytes: int | None = None
    mode: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRequest:
    """The content of another image: understood, and refused."""

    source: str
    target: str


MountRequest = BindRequest | VolumeRequest | TmpfsRequest | ImageRequest


def checked_target(target: str, *, path: str) -> str:
    """A mount's target without trailing slashes.

    Raises:
        InvalidRequestError: Not absolute, not normalised, `/`, or over a path that the sandbox needs itself.
    """
    checked_text(target, path=path)
    trimmed = target.rstrip("/")
    if target.startswith("/") and not trimmed:
        raise InvalidRequestError(f"{path} must not be '/'")
    if not is_plain_path(trimmed):
        raise InvalidRequestError(f"{path} must be an absolute, normalised path: no '.', no '..', no empty component")
    if any(len(part.encode()) > _MAX_COMPONENT_BYTES for part in trimmed.split("/")):
        raise InvalidRequestError(f"{path} holds a component of more than {_MAX_COMPONENT_BYTES} bytes")
    if len(trimmed.encode()) > _MAX_PATH_BYTES:
        raise InvalidRequestError(f"{path} has more than {_MAX_PATH_BYTES} bytes")
    if ":" in trimmed:
        raise InvalidRequestError(f"{path} must not hold ':', which the engine's mount syntax cannot carry")
    for taken in CONTROL_PATHS:
        if overlaps(trimmed, taken):
            raise InvalidRequestError(f"{path} {trimmed} overlaps {taken}, which the sandbox needs itself")
    if trimmed == "/dev":
        raise InvalidRequestError(f"{path} must not be /dev")
    return trimmed


def checked_bind_source(source: str, *, path: str) -> str:
    """A bind mount's source.

    Raises:
        InvalidRequestError: Not absolute or not normalised.
    """
    checked_text(source, path=path)
    if not is_plain_path(source):
        raise InvalidRequestError(f"{path} must be an absolute, normalised path of the host")
    if ":" in source:
        raise InvalidRequestError(f"{path} must not hold ':', which the engine's mount syntax cannot carry")
    return source


def checked_subpath(subpath: str, *, path: str) -> str:
    """A folder inside a volume.

    Raises:
        InvalidRequestError: Empty, absolute, or with an empty, `.` or `..` component.
    """
    checked_text(subpath, path=path)
    if subpath.startswith("/") or any(part in {"", ".", ".."} for part in subpath.split("/")):
        raise InvalidRequestError(f"{path} must be a relative path without '.', '..' or empty components")
    return subpath


def checked_text(text: str, *, path: str) -> str:
    """Text that names something on a disk.

    Raises:
        InvalidRequestError: Empty, with surrounding white space, or with a NUL or another control character.
    """
    if not text:
        raise InvalidRequestError(f"{path} must not be empty")
    if text != text.strip():
        raise InvalidRequestError(f"{path} has white space around it; it is not trimmed")
    if not text.isprintable():
        raise InvalidRequestError(f"{path} holds a NUL or another control character")
    return text


def checked_tmpfs(request: TmpfsRequest, *, path: str) -> TmpfsRequest:
    """A tmpfs whose options the engine takes, and whose size and mode are said once.

    Raises:
        InvalidRequestError: An option is unknown, malformed or repeated; a size is not positive; a mode is no mode.
            What an engine would pass to the kernel unseen fails when the container starts.
    """
    if request.size_bytes is not None and request.size_bytes <= 0:
        raise InvalidRequestError(f"{path}.size_bytes must be greater than 0")
    if request.mode is not None and not 0 <= request.mode <= _MAX_TMPFS_MODE:
        raise InvalidRequestError(f"{path}.mode must be 0 to {_MAX_TMPFS_MODE} (octal 7777)")
    seen = {key for key, value in (("size", request.size_bytes), ("mode", request.mode)) if value is not None}
    for index, option in enumerate(request.options):
        key, equals, value = option.partition("=")
        place = f"{path}.options[{index}]"
        if not (key in _TMPFS_VALUES if equals else key in _TMPFS_FLAGS):
            raise InvalidRequestError(f"{place} is no tmpfs option: one flag such as noexec, or size=, mode=, uid=, …")
        if equals and not _is_tmpfs_value(key, value):
            raise InvalidRequestError(f"{place} is no value for {key}")
        if key in seen:
            raise InvalidRequestError(f"{place} says {key} a second time")
        seen.add(key)
    return request


def check_unique(mounts: Iterable[MountRequest], *, path: str) -> None:
    """Refuse two mounts at one place.

    Raises:
        InvalidRequestError: A target is used twice.
    """
    seen: set[str] = set()
    for index, mount in enumerate(mounts):
        if mount.target in seen:
            raise InvalidRequestError(f"{path}[{index}].target {mount.target} is used by another mount")
        seen.add(mount.target)


def check_offered(
    mounts: Iterable[MountRequest], *, enable_bind_mounts: bool, admission_enabled: bool, api: tuple[int, int]
) -> None:
    """Refuse kinds of mounts that this configuration or engine does not offer.

    Args:
        mounts: What is asked for.
        enable_bind_mounts: The operator's key of that name.
        admission_enabled: Whether volume admission by labels is on; a folder of the host carries no labels.
        api: The engine's API version.

    Raises:
        PreconditionError: Naming the mount and the key that decides.
    """
    for index, mount in enumerate(mounts):
        place = f"template.driver_config.mounts[{index}]"
        match mount:
            case ImageRequest():
                raise PreconditionError(f"{place}: mounts of type image are not supported by the Docker driver")
            case BindRequest() if not enable_bind_mounts:
                raise PreconditionError(
                    f"{place}: bind mounts are not allowed here: the operator has not set enable_bind_mounts"
                )
            case BindRequest() if admission_enabled:
                raise PreconditionError(
                    f"{place}: bind mounts are not allowed while resource admission is enabled, "
                    "since a folder of the host carries no labels",
                    reason="ResourceAdmissionDenied",
                )
            case VolumeRequest() if mount.subpath and api < SUBPATH_API:
                raise PreconditionError(
                    f"{place}: subpath needs an engine with API {SUBPATH_API[0]}.{SUBPATH_API[1]} (Docker 26); "
                    f"this one has {api[0]}.{api[1]} and would mount the whole volume"
                )
            case _:
                pass


def check_against_workspace(mounts: Iterable[MountRequest], root: str) -> None:
    """Refuse a mount over the workspace; one below it is fine.

    Raises:
        MountError: A target is the workspace root or above it.
    """
    for mount in mounts:
        if root == mount.target or root.startswith(f"{mount.target}/"):
            raise MountError(f"mount target {mount.target} covers the workspace {root}; mount below it instead")


def check_resolved(target: str, resolved: str, *, workspace: str) -> None:
    """Refuse a mount that a symbolic link would bring to a place where none may be.

    Args:
        target: A target that is in order as it is written.
        resolved: Where it lies once the links in the container are followed.
        workspace: Where the workspace lies once they are.

    Raises:
        MountError: There, it would cover what the sandbox needs itself.
    """
    moved = resolved != target
    for taken in (*CONTROL_PATHS, "/dev") if moved else ():
        if resolved == "/" or (overlaps(resolved, taken) and not resolved.startswith("/dev/")):
            raise MountError(
                f"mount target {target} leads to {resolved} through a symbolic link and overlaps {taken}, "
                "which the sandbox needs itself"
            )
    if workspace == resolved or workspace.startswith(f"{resolved}/"):
        leads = f" leads to {resolved} through a symbolic link and" if moved else ""
        raise MountError(f"mount target {target}{leads} covers the workspace {workspace}; mount below it instead")


def engine_binds(mounts: Iterable[MountRequest]) -> tuple[str, ...]:
    """Bind mounts in the engine's `-v` form (compute-driver contract 5.5)."""
    return tuple(bind_option(mount) for mount in mounts if isinstance(mount, BindRequest))


def bind_option(mount: BindRequest) -> str:
    """One bind mount in the engine's `-v` form, which alone can relabel: `source:target[:ro][,z|Z]`."""
    options = [*(["ro"] if mount.read_only else []), *([mount.selinux.value] if mount.selinux else [])]
    return ":".join([mount.source, mount.target, *([",".join(options)] if options else [])])


def selinux_hint(mounts: Iterable[MountRequest], *, selinux: bool) -> str | None:
    """What to tell the user of bind mounts that a host with SELinux will probably keep the agent from.

    Args:
        mounts: What is mounted.
        selinux: Whether the engine confines containers with SELinux.
    """
    targets = [mount.target for mount in mounts if isinstance(mount, BindRequest) and mount.selinux is None]
    if not selinux or not targets:
        return None
    return (
        f"bind mounts without selinux_label on an engine that enforces SELinux: {', '.join(targets)}; "
        "if the agent gets 'Permission denied' there (exit code 126), set selinux_label to shared or private"
    )


def engine_volumes(mounts: Iterable[MountRequest]) -> tuple[VolumeMount, ...]:
    """Volume mounts; an empty volume is filled from the image, as the engine does by default."""
    return tuple(
        VolumeMount(
            volume=mount.source,
            target=mount.target,
            read_only=mount.read_only,
            copy_image_content=True,
            subpath=mount.subpath,
        )
        for mount in mounts
        if isinstance(mount, VolumeRequest)
    )


def engine_tmpfs(mounts: Iterable[MountRequest]) -> tuple[TmpfsMount, ...]:
    """Memory file systems in the engine's option form, since its mount objects take only size and mode."""
    return tuple(
        TmpfsMount(target=mount.target, options=_tmpfs_options(mount))
        for mount in mounts
        if isinstance(mount, TmpfsRequest)
    )


def _tmpfs_options(mount: TmpfsRequest) -> str:
    options = list(mount.options)
    if mount.size_bytes is not None:
        options.append(f"size={mount.size_bytes}")
    if mount.mode is not None:
        options.append(f"mode={mount.mode:o}")
    return ",".join(options)


def _is_tmpfs_value(key: str, value: str) -> bool:
    if not _TMPFS_VALUES[key].fullmatch(value):
        return False
    return key not in {"uid", "gid"} or int(value) <= MAX_ID
