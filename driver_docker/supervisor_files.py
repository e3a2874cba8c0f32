"""The operator's files that every supervisor is given: the gateway's CA, and the upstream proxy's secret and CAs.

They are read anew for each launch, so that a rotated file counts from the next start on (compute-driver contract 5.7).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from driver_docker.engine_address import engine_is_local
from driver_docker.errors import ProvisioningError
from driver_docker.isolation_backends import Delegation, supervisor_binds
from driver_docker.regular_file import read_regular
from driver_docker.upstream_proxy import spiffe_binds
from openshell.isolation.documents import DocumentError, TransportTls
from openshell.status import StatusCode

if TYPE_CHECKING:
    from pathlib import Path

    from driver_docker.config import DriverConfig

MAX_FILE_BYTES: Final = 1024 * 1024
_MAX_SECRET_BYTES: Final = 16 * 1024
_CERTIFICATE: Final = b"-----BEGIN CERTIFICATE-----"


class SupervisorFileError(ProvisioningError):
    """A file that the configuration names cannot be used."""

    default_reason = "BoundaryConfigWriteFailed"
    default_status = StatusCode.FAILED_PRECONDITION


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorFiles:
    """Contents; `None` where the configuration names no file."""

    gateway_ca: bytes | None = field(default=None, repr=False)
    proxy_auth: bytes | None = field(default=None, repr=False)
    proxy_ca_bundle: bytes | None = field(default=None, repr=False)


def read_supervisor_files(config: DriverConfig) -> SupervisorFiles:
    """Read them all. Blocks; run it on a thread.

    Raises:
        SupervisorFileError: A file is missing, unreadable, empty, too large, or holds no certificate where one is due.
            The text names the key and never quotes the content. Or a folder that is to be shown to the supervisor is
            not there: the engine would make an empty one.
    """
    _check_folders(config)
    return SupervisorFiles(
        gateway_ca=_certificates("guest_tls_ca", config.guest_tls_ca),
        proxy_auth=read_proxy_auth(config),
        proxy_ca_bundle=_certificates("proxy_ca_bundle", config.proxy_ca_bundle),
    )


def read_proxy_auth(config: DriverConfig) -> bytes | None:
    """The upstream proxy's credentials; `None` where none are configured. Blocks; run it on a thread.

    Raises:
        SupervisorFileError: The file cannot be used.
    """
    return _read("proxy_auth_file", config.proxy_auth_file, limit=_MAX_SECRET_BYTES)


def read_delegation(config: DriverConfig) -> Delegation | None:
    """What a supervisor is told about the selected backend; `None` for the built-in one. Blocks.

    Raises:
        SupervisorFileError: The backend's trust anchor cannot be used.
    """
    backend = config.delegated_backend
    if backend is None:
        return None
    key = f"isolation_backends.{backend.name}.trust_anchor"
    anchor = _certificates(key, backend.trust_anchor) or b""
    try:
        tls = TransportTls(server_name=backend.server_name or "", trust_anchor_pem=anchor.decode("ascii", "replace"))
    except DocumentError as error:
        raise SupervisorFileError(f"isolation backend {backend.name} cannot be used: {error.message}") from None
    return Delegation(backends=backend.as_supervisor_sees_it(), tls=tls)


def _check_folders(config: DriverConfig) -> None:
    if not engine_is_local(config):
        return
    binds = spiffe_binds(config) + supervisor_binds(config.delegated_backend)
    for folder in (bind.partition(":")[0] for bind in binds):
        if not os.path.isdir(folder):  # noqa: PTH112 - unlike Path's, it never raises
            raise SupervisorFileError(
                f"folder {folder}, which the configuration names for supervisors, does not exist, or the driver cannot "
                "see it"
            )


def _certificates(key: str, file: Path | None) -> bytes | None:
    content = _read(key, file, limit=MAX_FILE_BYTES)
    if content is not None and _CERTIFICATE not in content:
        raise SupervisorFileError(f"{key} {file} holds no PEM certificate")
    return content


def _read(key: str, file: Path | None, *, limit: int) -> bytes | None:
    if file is None:
        return None
    try:
        content = read_regular(file, limit_bytes=limit + 1)
    except OSError as error:
        raise SupervisorFileError(f"{key} {file} cannot be read: {error.strerror}") from error
    if not content.strip():
        raise SupervisorFileError(f"{key} {file} is empty")
    if len(content) > limit:
        raise SupervisorFileError(f"{key} {file} is larger than {limit} bytes")
    return content
