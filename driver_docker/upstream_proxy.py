"""The operator's upstream proxy and SPIFFE socket: what may be configured, and what the supervisor is told. Pure.

Flags and variables of compute-driver contract 5.7. The proxy's credentials travel as a file, never as a flag.
"""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from driver_docker.http_address import AddressCredentialsError, check_http_address
from driver_docker.workspace import is_plain_path

if TYPE_CHECKING:
    from driver_docker.config import DriverConfig

SUPERVISOR_DIR: Final = "/.openshell/supervisor"
PROXY_AUTH_PATH: Final = f"{SUPERVISOR_DIR}/upstream-proxy-auth"
PROXY_CA_BUNDLE_PATH: Final = f"{SUPERVISOR_DIR}/upstream-proxy-ca-bundle.pem"
SPIFFE_VARIABLE: Final = "OPENSHELL_PROVIDER_SPIFFE_WORKLOAD_API_SOCKET"

_TAKEN_DIRS: Final = ("/", "/run", "/tmp", "/var/log", "/var", "/.openshell", "/dev", "/etc", "/proc", "/sys")  # noqa: S108
_TAKEN_BELOW: Final = ("/.openshell/", "/run/openshell/", "/proc/", "/sys/")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyKeys:
    """The keys of the configuration that speak of the upstream proxy."""

    https_proxy: str | None
    no_proxy: str | None
    proxy_auth_file: object | None
    proxy_auth_allow_insecure: bool
    proxy_connect_by_hostname: bool
    proxy_ca_bundle: object | None


def check_proxy(keys: ProxyKeys) -> None:
    """Refuse what cannot work, and what would tell a secret.

    Raises:
        ValueError: Naming the key; never quoting the proxy's address, which may hold a password.
    """
    if keys.https_proxy is None:
        dependent = {
            "no_proxy": keys.no_proxy,
            "proxy_auth_file": keys.proxy_auth_file,
            "proxy_auth_allow_insecure": keys.proxy_auth_allow_insecure,
            "proxy_connect_by_hostname": keys.proxy_connect_by_hostname,
            "proxy_ca_bundle": keys.proxy_ca_bundle,
        }
        for key, value in dependent.items():
            if value:
                raise ValueError(f"{key} needs https_proxy")
        return
    try:
        check_http_address(keys.https_proxy)
    except AddressCredentialsError as error:
        raise ValueError(f"https_proxy {error}; put them into proxy_auth_file") from None
    except ValueError as error:
        raise ValueError(f"https_proxy {error}") from None
    if keys.no_proxy is not None and (not keys.no_proxy.strip() or not keys.no_proxy.isprintable()):
        raise ValueError("no_proxy must be a list such as 'localhost,10.0.0.0/8'")
    if keys.proxy_auth_file and urlsplit(keys.https_proxy).scheme == "http" and not keys.proxy_auth_allow_insecure:
        raise ValueError(
            "proxy_auth_file would send credentials unencrypted to an http:// https_proxy; "
            "use https:// or set proxy_auth_allow_insecure"
        )


def check_spiffe_socket(socket: str) -> str:
    """The socket of the SPIFFE Workload API: an absolute path whose folder can be shown to a supervisor.

    Raises:
        ValueError: Not absolute, not normalised, or in a folder that the supervisor has a file system of its own at.
    """
    folder = posixpath.dirname(socket)
    if not is_plain_path(socket):
        raise ValueError("must be an absolute, normalised path without control characters")
    if ":" in socket or socket != socket.strip():
        raise ValueError("must not hold ':' or white space around it")
    if folder in _TAKEN_DIRS or f"{folder}/".startswith(_TAKEN_BELOW):
        raise ValueError(f"must lie in a folder of its own; the supervisor cannot be given {folder}")
    return socket


def proxy_arguments(config: DriverConfig) -> tuple[str, ...]:
    """The supervisor's flags for the upstream proxy."""
    if config.https_proxy is None:
        return ()
    arguments = ["--upstream-proxy", config.https_proxy]
    if config.no_proxy is not None:
        arguments += ["--upstream-no-proxy", config.no_proxy]
    if config.proxy_auth_file is not None:
        arguments += ["--upstream-proxy-auth-file", PROXY_AUTH_PATH]
    if config.proxy_auth_allow_insecure:
        arguments.append("--upstream-proxy-auth-allow-insecure")
    if config.proxy_connect_by_hostname:
        arguments.append("--upstream-proxy-connect-by-hostname")
    if config.proxy_ca_bundle is not None:
        arguments += ["--upstream-proxy-ca-bundle", PROXY_CA_BUNDLE_PATH]
    return tuple(arguments)


def spiffe_environment(config: DriverConfig) -> dict[str, str]:
    """The supervisor's variable for the SPIFFE socket."""
    socket = config.provider_spiffe_workload_api_socket
    return {SPIFFE_VARIABLE: socket} if socket is not None else {}


def spiffe_binds(config: DriverConfig) -> tuple[str, ...]:
    """The socket's folder, read-only: a socket that its agent makes anew stays reachable that way."""
    socket = config.provider_spiffe_workload_api_socket
    if socket is None:
        return ()
    folder = posixpath.dirname(socket)
    return (f"{folder}:{folder}:ro",)
