"""Gateways that are configured on this machine (public-api contract 1.1)."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from openshell._endpoint import Endpoint, TlsConfig
from openshell.errors import GatewayConfigurationError, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Mapping

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_MAX_FILE_BYTES = 64 * 1024
_ANONYMOUS_MODES = frozenset({None, "", "none", "plaintext", "mtls"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfiguredGateway:
    """One gateway and how to reach it."""

    name: str
    """Its configured name, or the endpoint itself when it came from an option."""
    endpoint: Endpoint
    """Where it listens."""
    tls: TlsConfig | None = None
    """Client files, when the configuration holds them."""


def user_directory(environment: Mapping[str, str]) -> Path:
    """``$XDG_CONFIG_HOME/openshell``, else ``$HOME/.config/openshell``."""
    base = environment.get("XDG_CONFIG_HOME")
    if base and Path(base).is_absolute():
        return Path(base) / "openshell"
    return Path(environment.get("HOME") or Path.home()) / ".config" / "openshell"


def system_directory(environment: Mapping[str, str]) -> Path:
    """``$OPENSHELL_SYSTEM_GATEWAY_DIR`` when absolute, else ``/etc/openshell``."""
    base = environment.get("OPENSHELL_SYSTEM_GATEWAY_DIR")
    return Path(base) if base and Path(base).is_absolute() else Path("/etc/openshell")


def find_gateway(
    *,
    endpoint: str | None = None,
    name: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> ConfiguredGateway:
    """The gateway to use: explicit endpoint, named gateway, then the active one of the user, then of the system.

    ``OPENSHELL_GATEWAY_ENDPOINT`` and ``OPENSHELL_GATEWAY`` stand in for the two arguments when those are not given.

    Raises:
        GatewayConfigurationError: None is configured, or its files cannot be used; the text names the file.
        InvalidArgumentError: The endpoint is not an address.
    """
    env = os.environ if environment is None else environment
    if endpoint is None and name is None:
        endpoint = env.get("OPENSHELL_GATEWAY_ENDPOINT") or None
    if endpoint is not None:
        return ConfiguredGateway(name=endpoint, endpoint=Endpoint.parse(endpoint))
    roots = (user_directory(env), system_directory(env))
    chosen = name or env.get("OPENSHELL_GATEWAY") or _active_name(roots)
    if chosen is None:
        raise GatewayConfigurationError(
            f"no gateway is selected: pass an endpoint, set OPENSHELL_GATEWAY_ENDPOINT, or write a name to "
            f"{roots[0] / 'active_gateway'}"
        )
    if not _NAME.fullmatch(chosen):
        raise GatewayConfigurationError(f"{chosen!r} is not a gateway name: letters, digits, '.', '_' and '-' only")
    for root in roots:
        folder = root / "gateways" / chosen
        if (folder / "metadata.json").is_file():
            return _load(chosen, folder)
    raise GatewayConfigurationError(
        f"gateway {chosen!r} is not configured: there is no {roots[0] / 'gateways' / chosen / 'metadata.json'}"
    )


def _active_name(roots: tuple[Path, Path]) -> str | None:
    for root in roots:
        path = root / "active_gateway"
        if path.is_file():
            found = _read_text(path).strip()
            if _NAME.fullmatch(found):
                return found
    return None


def _load(name: str, folder: Path) -> ConfiguredGateway:
    path = folder / "metadata.json"
    try:
        metadata = json.loads(_read_text(path))
    except ValueError as error:
        raise GatewayConfigurationError(f"{path} is not valid JSON: {error}") from error
    address = metadata.get("gateway_endpoint") if isinstance(metadata, dict) else None
    if not isinstance(address, str) or not address:
        raise GatewayConfigurationError(f"{path} holds no gateway_endpoint")
    mode = metadata.get("auth_mode")
    if not isinstance(mode, str | None) or mode not in _ANONYMOUS_MODES:
        raise GatewayConfigurationError(
            f"{path}: auth_mode {mode!r} needs a login that this client does not do; pass endpoint and token instead"
        )
    try:
        endpoint = Endpoint.parse(address)
    except InvalidArgumentError as error:
        raise GatewayConfigurationError(f"{path}: {error}") from error
    return ConfiguredGateway(name=name, endpoint=endpoint, tls=_tls(folder / "mtls") if endpoint.secure else None)


def _tls(folder: Path) -> TlsConfig | None:
    ca, cert, key = (folder / name for name in ("ca.crt", "tls.crt", "tls.key"))
    if not folder.is_dir():
        return None
    return TlsConfig(
        ca_path=ca if ca.is_file() else None,
        cert_path=cert if cert.is_file() else None,
        key_path=key if key.is_file() else None,
    )


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
        if len(data) > _MAX_FILE_BYTES:
            raise GatewayConfigurationError(f"{path} is larger than {_MAX_FILE_BYTES} bytes")
        return data.decode("utf-8")
    except OSError as error:
        raise GatewayConfigurationError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise GatewayConfigurationError(f"{path} is not UTF-8") from error
