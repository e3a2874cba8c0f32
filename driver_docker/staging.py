"""The archives that carry a launch's files into its two created containers. Pure.

An archive keeps the owners and modes of its headers when it is uploaded (checked on Docker 20.10). The workload's goes
to `/`: its channel volume is writable there. The supervisor's root is read-only, so its archive goes to the mount point
of its files volume.
"""

from __future__ import annotations

import io
import tarfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from driver_docker.config import Staging
from driver_docker.isolation_backends import BOUNDARY_LAUNCH_PATH, ISOLATION_BACKENDS_PATH
from driver_docker.plan import (
    AUTH_BUNDLE_PATH,
    BOOTSTRAP_PATH,
    BOUNDARY_DIR,
    DESCRIPTOR_PATH,
    GATEWAY_CA_PATH,
    SERVER_CERTIFICATE_PATH,
    SERVER_KEY_PATH,
    SUPERVISOR_DIR,
    SUPERVISOR_GID,
    SUPERVISOR_UID,
)
from driver_docker.upstream_proxy import PROXY_AUTH_PATH, PROXY_CA_BUNDLE_PATH
from driver_docker.workspace import CHANNEL_DIR, DEFAULT_WORKSPACE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from driver_docker.documents import LaunchDocuments
    from openshell.isolation.documents import WorkloadIdentity

WORKLOAD_ARCHIVE_ROOT = "/"
SUPERVISOR_ARCHIVE_ROOT = SUPERVISOR_DIR


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedEntry:
    """One file, or one directory where `content` is `None`."""

    path: str
    """Relative to the archive's root, without a leading slash."""
    mode: int
    uid: int = 0
    gid: int = 0
    content: bytes | None = field(default=None, repr=False)


def workload_entries(
    documents: LaunchDocuments, identity: WorkloadIdentity, *, workspace_root: str
) -> tuple[StagedEntry, ...]:
    """The workload's files, relative to `/` (compute-driver contract 5.5).

    The boundary's folder belongs to the workload's user, since the runtime deletes the bootstrap and the key after
    reading them.
    """

    def owned(path: str, mode: int, content: bytes | None = None) -> StagedEntry:
        return StagedEntry(path=path.lstrip("/"), mode=mode, uid=identity.uid, gid=identity.gid, content=content)

    entries = [
        StagedEntry(path=".openshell", mode=0o755),
        StagedEntry(path=CHANNEL_DIR.lstrip("/"), mode=0o755),
        owned(BOUNDARY_DIR, 0o711),
        owned(BOOTSTRAP_PATH, 0o600, documents.bootstrap),
        owned(SERVER_CERTIFICATE_PATH, 0o600, documents.server_certificate),
        owned(SERVER_KEY_PATH, 0o600, documents.server_key),
    ]
    if workspace_root == DEFAULT_WORKSPACE:
        entries.append(owned(workspace_root, 0o700))
    return tuple(entries)


def supervisor_entries(
    documents: LaunchDocuments,
    *,
    gateway_ca: bytes | None,
    proxy_auth: bytes | None = None,
    proxy_ca_bundle: bytes | None = None,
    layout: Staging = Staging.LEAN,
) -> tuple[StagedEntry, ...]:
    """The supervisor's files, relative to its files volume.

    Lean: readable for the supervisor's group, writable for nobody but root. Upstream: the supervisor's own, in a volume
    that it cannot write to (compute-driver contract 5.7).
    """
    owner = SUPERVISOR_UID if layout is Staging.UPSTREAM else 0

    def entry(path: str, content: bytes | None, modes: tuple[int, int]) -> StagedEntry:
        lean, upstream = modes
        return StagedEntry(
            path=path.removeprefix(f"{SUPERVISOR_DIR}/"),
            mode=upstream if layout is Staging.UPSTREAM else lean,
            uid=owner,
            gid=SUPERVISOR_GID,
            content=content,
        )

    def readable(path: str, content: bytes) -> StagedEntry:
        return entry(path, content, (0o440, 0o600))

    entries = [
        readable(DESCRIPTOR_PATH, documents.descriptor),
        readable(AUTH_BUNDLE_PATH, documents.auth_bundle),
    ]
    if documents.boundary_launch is not None:
        entries.append(readable(BOUNDARY_LAUNCH_PATH, documents.boundary_launch))
    if documents.isolation_backends is not None:
        entries.append(readable(ISOLATION_BACKENDS_PATH, documents.isolation_backends))
    if gateway_ca is not None:
        entries.append(entry("tls", None, (0o550, 0o700)))
        entries.append(readable(GATEWAY_CA_PATH, gateway_ca))
    if proxy_auth is not None:
        entries.append(readable(PROXY_AUTH_PATH, proxy_auth))
    if proxy_ca_bundle is not None:
        entries.append(entry(PROXY_CA_BUNDLE_PATH, proxy_ca_bundle, (0o444, 0o644)))
    return tuple(entries)


def build_tar(entries: Iterable[StagedEntry]) -> bytes:
    """An uncompressed archive of the entries, in their order, with exactly these owners and modes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for entry in entries:
            header = tarfile.TarInfo(entry.path)
            header.mode = entry.mode
            header.uid = entry.uid
            header.gid = entry.gid
            if entry.content is None:
                header.type = tarfile.DIRTYPE
                archive.addfile(header)
            else:
                header.size = len(entry.content)
                archive.addfile(header, io.BytesIO(entry.content))
    return buffer.getvalue()


def read_single_file(tar: bytes) -> bytes | None:
    """The content of the only regular file of an archive, or `None` when it holds none (a link, a directory)."""
    with tarfile.open(fileobj=io.BytesIO(tar), mode="r:") as archive:
        for member in archive:
            if member.isreg():
                stream = archive.extractfile(member)
                return stream.read() if stream is not None else None
    return None
