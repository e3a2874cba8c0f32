"""Reading what the driver left for this start, and leaving nothing of it behind.

The files lie in a folder that the workload's uid owns, so they are read before any untrusted code runs and removed at
once (compute-driver contract 5.5: consumed at start, restaged for every start).
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from openshell.isolation.documents import BoundaryBootstrap, DocumentError, UnixListener
from openshell.isolation.errors import cause_of
from sandbox_runtime.errors import BootstrapError

_LARGEST_DOCUMENT_BYTES = 4 * 1024 * 1024
_LARGEST_PEM_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Provisioned:
    """What the driver provisioned."""

    bootstrap: BoundaryBootstrap
    socket_path: Path
    certificate_chain_pem: str = field(repr=False)
    private_key_pem: str = field(repr=False)


def consume(path: Path) -> Provisioned:
    """Read the bootstrap document and the TLS material that it names, and delete all of it.

    The document is deleted even when it turns out to be unusable.

    Raises:
        BootstrapError: Something is missing, malformed, too large, no regular file, or cannot be deleted. The text
            names the file or the member and quotes no value.
    """
    data = _take(path, "bootstrap document", _LARGEST_DOCUMENT_BYTES)
    try:
        bootstrap = BoundaryBootstrap.from_json(data)
    except DocumentError as error:
        raise BootstrapError(f"the bootstrap document {path} is not valid: {error}") from error
    listener = bootstrap.listener
    if not isinstance(listener, UnixListener):
        raise BootstrapError(f"the bootstrap document {path} is not valid: this runtime listens on unix sockets only")
    if bootstrap.resource_claim_files:
        # Ignoring them would bind the boundary to less than the driver asked for.
        raise BootstrapError(
            f"the bootstrap document {path} is not valid: bootstrap.resource_claim_files: this runtime reads no claims "
            "from files; state them in resource_claims"
        )
    chain = _take(Path(listener.tls.certificate_chain_path), "certificate chain", _LARGEST_PEM_BYTES)
    key = _take(Path(listener.tls.private_key_path), "private key", _LARGEST_PEM_BYTES)
    try:
        return Provisioned(
            bootstrap=bootstrap,
            socket_path=Path(listener.socket_path),
            certificate_chain_pem=chain.decode("ascii"),
            private_key_pem=key.decode("ascii"),
        )
    except UnicodeDecodeError:
        raise BootstrapError("the TLS material is not PEM") from None


def _take(path: Path, what: str, limit_bytes: int) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise BootstrapError(f"the {what} {path} is not a regular file")
            data = _read_all(fd, limit_bytes)
        finally:
            os.close(fd)
        path.unlink()
    except OSError as error:
        cause = cause_of(error).lower()
        raise BootstrapError(f"the {what} {path} cannot be read and removed: {cause}") from error
    if len(data) > limit_bytes:
        raise BootstrapError(f"the {what} {path} is larger than {limit_bytes} bytes")
    return data


def _read_all(fd: int, limit_bytes: int) -> bytes:
    collected = bytearray()
    while len(collected) <= limit_bytes:
        data = os.read(fd, limit_bytes + 1 - len(collected))
        if not data:
            break
        collected += data
    return bytes(collected)
