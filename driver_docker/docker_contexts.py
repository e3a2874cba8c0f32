"""Docker's own context store, read only: which engine the user of this machine works with.

`$DOCKER_CONFIG` (else `~/.docker`) holds `config.json` with the current context's name,
`contexts/meta/<sha256 of the name>/meta.json` with its address and `contexts/tls/<sha256>/docker/` with its
certificates.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from driver_docker.engine_tls import EngineTls, is_there
from driver_docker.errors import ConfigurationError
from driver_docker.regular_file import read_regular

if TYPE_CHECKING:
    from collections.abc import Mapping

_MAX_BYTES: Final = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextEndpoint:
    """The Docker endpoint of a context."""

    host: str
    tls: EngineTls | None = None


def docker_config_dir(environment: Mapping[str, str]) -> Path:
    """Where Docker's client keeps its configuration."""
    if configured := environment.get("DOCKER_CONFIG"):
        return Path(configured)
    return Path(environment.get("HOME") or "/root") / ".docker"


def current_context(environment: Mapping[str, str]) -> str | None:
    """The context that the user chose; `None` for none or `default`, and where the file cannot be read."""
    try:
        body = _read(docker_config_dir(environment) / "config.json")
    except (OSError, ValueError):
        return None
    name = body.get("currentContext")
    return name if isinstance(name, str) and name not in {"", "default"} else None


def read_context(name: str, environment: Mapping[str, str], *, named_by: str) -> ContextEndpoint:
    """The endpoint of a context.

    Args:
        name: The context's name.
        environment: The process's environment.
        named_by: Who asked for this context, for the error's text.

    Raises:
        ConfigurationError: There is none of that name, it has no Docker endpoint, or it skips verification.
    """
    store = docker_config_dir(environment) / "contexts"
    digest = hashlib.sha256(name.encode()).hexdigest()
    file = store / "meta" / digest / "meta.json"
    try:
        endpoint = _read(file)["Endpoints"]["docker"]
        host = str(endpoint["Host"])
    except FileNotFoundError:
        raise ConfigurationError(f"Docker context {name}, named by {named_by}, does not exist in {store}") from None
    except OSError as error:
        raise ConfigurationError(f"Docker context {name} cannot be read from {file}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise ConfigurationError(f"Docker context {name} has no Docker endpoint in {file}") from None
    if not host.startswith("tcp://"):
        return ContextEndpoint(host=host)
    if endpoint.get("SkipTLSVerify"):
        raise ConfigurationError(
            f"Docker context {name} skips the verification of its engine, which this driver does not offer"
        )
    folder = store / "tls" / digest / "docker"
    return ContextEndpoint(host=host, tls=EngineTls.in_folder(folder) if is_there(folder / "ca.pem") else None)


def _read(file: Path) -> dict[str, Any]:
    try:
        body = json.loads(read_regular(file, limit_bytes=_MAX_BYTES))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return body if isinstance(body, dict) else {}
