"""TLS files of a connection to an engine. Verification is never off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from driver_docker.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTls:
    """Which CA the engine's certificate must come from, and who this driver is to it."""

    ca: Path
    certificate: Path | None = None
    key: Path | None = None

    @classmethod
    def in_folder(cls, folder: Path) -> EngineTls:
        """The files as docker's own client names them in a folder; the client's certificate only with its key.

        Raises:
            ConfigurationError: One of them cannot be looked at.
        """
        certificate, key = folder / "cert.pem", folder / "key.pem"
        has_own = is_there(certificate) and is_there(key)
        return cls(ca=folder / "ca.pem", certificate=certificate if has_own else None, key=key if has_own else None)


def is_there(file: Path) -> bool:
    """Whether a file exists. One that cannot be looked at is not taken for none: TLS would be left out in silence.

    Raises:
        ConfigurationError: It cannot be looked at.
    """
    try:
        return file.exists()
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be looked at: {error.strerror}") from error
