"""The driver's configuration: one model, three sources (flags over environment over file), unknown keys refused.

Keys and defaults follow compute-driver contract 7.3; keys of our own are marked. A key that exists in the contract but
is not offered by this driver is read, so that its name is known, and refused when it is set.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import tomllib
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from driver_docker.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

ENVIRONMENT_PREFIX: Final = "OPENSHELL_DOCKER_DRIVER_"
"""Environment variable of a key: this prefix and the key's name in upper case."""

DEFAULT_REQUIRED_LABELS: Final = {
    "openshell.ai/sandbox-attachable": "true",
    "openshell.ai/sandbox-attachable-workspace": "${workspace}",
}
_RESERVED_ADMISSION_KEYS: Final = frozenset(
    {"openshell.ai/managed-by", "openshell.ai/gateway-id", "openshell.ai/sandbox-workspace"}
)
_WORKSPACE_PLACEHOLDER: Final = "${workspace}"
_LABEL_VALUE: Final = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
_LABEL_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_LABEL_PREFIX: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_NOT_OFFERED: Final = {
    "supervisor_bin": "name an image with sandbox_runtime_image instead",
    "guest_tls_cert": "only guest_tls_ca is used in the split topology",
    "guest_tls_key": "only guest_tls_ca is used in the split topology",
    "https_proxy": "upstream proxies are not offered yet",
    "no_proxy": "upstream proxies are not offered yet",
    "proxy_auth_file": "upstream proxies are not offered yet",
    "proxy_auth_allow_insecure": "upstream proxies are not offered yet",
    "proxy_connect_by_hostname": "upstream proxies are not offered yet",
    "proxy_ca_bundle": "upstream proxies are not offered yet",
    "provider_spiffe_workload_api_socket": "SPIFFE sockets are not offered yet",
    "enable_bind_mounts": "mounts are not offered yet",
}


class PullPolicy(StrEnum):
    """When an image is pulled."""

    ALWAYS = "always"
    IF_NOT_PRESENT = "if_not_present"
    NEVER = "never"


class Staging(StrEnum):
    """How the supervisor's files reach its volume."""

    LEAN = "lean"
    """Owned by root, readable by group 65534, uploaded through the supervisor container itself."""
    UPSTREAM = "upstream"
    """Owned by 65534, uploaded through a throw-away container (compute-driver contract 5.7)."""


class PublicDetail(StrEnum):
    """What of a supervisor's last line a condition may quote."""

    LAST_LINE = "last-line"
    NONE = "none"


class LogLevel(StrEnum):
    """Threshold of the driver's own log and of the containers' `OPENSHELL_LOG_LEVEL`."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class ResourceAdmission(_Table):
    """Which volumes a sandbox may attach (compute-driver contract 7.3)."""

    enabled: bool = True
    required_labels: dict[str, str] = Field(default_factory=lambda: dict(DEFAULT_REQUIRED_LABELS))

    @model_validator(mode="after")
    def _check(self) -> Self:
        for key, value in self.required_labels.items():
            prefix, slash, name = key.rpartition("/")
            if not _LABEL_NAME.fullmatch(name) or (slash and not _LABEL_PREFIX.fullmatch(prefix)):
                raise ValueError(f"{key!r} is no label key")
            if key in _RESERVED_ADMISSION_KEYS:
                raise ValueError(f"{key!r} is reserved and may not be required")
            if value != _WORKSPACE_PLACEHOLDER and not _LABEL_VALUE.fullmatch(value):
                raise ValueError(f"the value of {key!r} is no label value; {_WORKSPACE_PLACEHOLDER} must stand alone")
        fixed = [value for value in self.required_labels.values() if value != _WORKSPACE_PLACEHOLDER]
        if self.enabled and not fixed:
            raise ValueError("at least one required label must have a fixed value while admission is enabled")
        return self


class DriverConfig(_Table):
    """Everything that decides how this driver behaves."""

    bind_socket: Path
    """Where the driver serves (ours; `--bind-socket`, `OPENSHELL_COMPUTE_DRIVER_SOCKET`)."""
    state_dir: Path
    """Owner-only folder of records (ours); default `$XDG_STATE_HOME/openshell/docker-sandbox-tokens`."""
    socket_path: str | None = None
    """Docker's API socket or a `unix://`, `tcp://`, `ssh://` address; found by itself when absent."""
    sandbox_label: str = "default"
    """The namespace that separates this driver's containers from those of others on the same engine."""
    grpc_endpoint: str = "http://127.0.0.1:17670"
    """Where supervisors reach the gateway."""
    default_image: str = "nvcr.io/nvidia/base/ubuntu:24.04"
    image_pull_policy: PullPolicy = PullPolicy.IF_NOT_PRESENT
    sandbox_runtime_image: str = "ghcr.io/nvidia/openshell/sandbox:0.1.5"
    supervisor_image: str = "ghcr.io/nvidia/openshell/supervisor:0.1.5"
    guest_tls_ca: Path | None = None
    ssh_socket_path: str = "/run/openshell/ssh.sock"
    sandbox_pids_limit: Annotated[int, Field(ge=1, le=2**31 - 1)] = 2048
    app_armor_profile: str | None = None
    allow_driver_config: bool = False
    resource_admission: ResourceAdmission = Field(default_factory=ResourceAdmission)
    telemetry_enabled: bool = False
    """The containers' `OPENSHELL_TELEMETRY_ENABLED` (ours)."""
    log_level: LogLevel = LogLevel.INFO

    gateway_manages_lifecycle: bool = True
    """Whether the gateway stops and starts all sandboxes around its own restarts (ours to choose)."""
    staging: Staging = Staging.LEAN
    """How supervisor files are staged (ours)."""
    public_detail: PublicDetail = PublicDetail.LAST_LINE
    """What of a supervisor's last line a condition may quote (ours)."""
    start_concurrency: Annotated[int, Field(ge=1, le=64)] = 4
    """How many sandboxes are launched at a time (ours)."""
    stop_grace_seconds: Annotated[int, Field(ge=0, le=600)] = 10
    """Grace of a workload's stop (ours; compute-driver contract 3.14)."""
    supervisor_stop_grace_seconds: Annotated[int, Field(ge=0, le=600)] = 5
    """Grace of a supervisor's stop (ours; compute-driver contract 3.14)."""
    resync_interval_seconds: Annotated[float, Field(ge=1.0, le=3600.0)] = 60.0
    """How often every container is looked at again although events are read (ours)."""

    supervisor_bin: str | None = None
    guest_tls_cert: str | None = None
    guest_tls_key: str | None = None
    enable_bind_mounts: bool = False
    https_proxy: str | None = None
    no_proxy: str | None = None
    proxy_auth_file: str | None = None
    proxy_auth_allow_insecure: bool = False
    proxy_connect_by_hostname: bool = False
    proxy_ca_bundle: str | None = None
    provider_spiffe_workload_api_socket: str | None = None

    @field_validator("sandbox_label")
    @classmethod
    def _label(cls, value: str) -> str:
        if not value or not _LABEL_VALUE.fullmatch(value):
            raise ValueError("must be 1 to 63 of A-Z a-z 0-9 _ . - and start and end with a letter or digit")
        return value

    @field_validator("default_image", "sandbox_runtime_image", "supervisor_image")
    @classmethod
    def _image(cls, value: str) -> str:
        if not value or value != value.strip() or any(char.isspace() for char in value):
            raise ValueError("must be an image reference without white space")
        return value

    @field_validator("app_armor_profile")
    @classmethod
    def _app_armor(cls, value: str | None) -> str | None:
        if value is None or value in {"Unconfined", "RuntimeDefault"} or re.fullmatch(r"Localhost/[\w.-]+", value):
            return value
        raise ValueError("must be Unconfined, RuntimeDefault or Localhost/<name>")

    @field_validator("grpc_endpoint")
    @classmethod
    def _endpoint(cls, value: str) -> str:
        parts = urlsplit(value)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError("must be http://host:port or https://host:port")
        if not parts.port:
            raise ValueError("must name a port other than 0")
        return value

    @model_validator(mode="after")
    def _together(self) -> Self:
        for key, advice in _NOT_OFFERED.items():
            if getattr(self, key):
                raise ValueError(f"{key} is not supported by this driver: {advice}")
        if self.staging is Staging.UPSTREAM:
            raise ValueError("staging = 'upstream' is not offered yet; use 'lean'")
        secure = urlsplit(self.grpc_endpoint).scheme == "https"
        if secure and self.guest_tls_ca is None:
            raise ValueError("guest_tls_ca is needed for an https grpc_endpoint")
        if not secure and self.guest_tls_ca is not None:
            raise ValueError("guest_tls_ca is refused for an http grpc_endpoint")
        return self

    @property
    def host_gateway_ip(self) -> str | None:
        """IPv4 of the endpoint's host; `None` for names other than localhost and for IPv6 (contract 5.6)."""
        host = urlsplit(self.grpc_endpoint).hostname or ""
        if host == "localhost":
            return "127.0.0.1"
        try:
            return str(ipaddress.IPv4Address(host))
        except ValueError:
            return None

    @property
    def namespace_dir(self) -> Path:
        """Where the records of this driver's namespace are."""
        return self.state_dir / self.sandbox_label


def default_state_dir(environment: Mapping[str, str]) -> Path:
    """The records' folder when none is configured (compute-driver contract 5.1)."""
    base = environment.get("XDG_STATE_HOME")
    root = Path(base) if base else Path(environment.get("HOME") or "/root") / ".local" / "state"
    return root / "openshell" / "docker-sandbox-tokens"


def load_config(
    flags: Mapping[str, Any], *, file: Path | None = None, environment: Mapping[str, str] | None = None
) -> DriverConfig:
    """Merge flags, environment and file, in this order of precedence.

    Args:
        flags: Keys given on the command line; absent ones are `None`.
        file: A TOML file whose top level is the driver's table.
        environment: The process's environment.

    Raises:
        ConfigurationError: Naming the key, where it came from, and what it should be.
    """
    surroundings = os.environ if environment is None else environment
    merged: dict[str, Any] = {"state_dir": default_state_dir(surroundings)}
    if file is not None:
        merged |= _from_file(file)
    for key in DriverConfig.model_fields:
        value = surroundings.get(ENVIRONMENT_PREFIX + key.upper())
        if value:
            merged[key] = value
    if level := surroundings.get("OPENSHELL_LOG_LEVEL"):
        merged["log_level"] = level.lower()
    if bind := surroundings.get("OPENSHELL_COMPUTE_DRIVER_SOCKET"):
        merged["bind_socket"] = bind
    merged |= {key: value for key, value in flags.items() if value is not None}
    try:
        return DriverConfig.model_validate(merged)
    except ValidationError as error:
        raise ConfigurationError(_explained(error)) from None


def _from_file(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            return tomllib.load(stream)
    except OSError as error:
        raise ConfigurationError(f"configuration file {file} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"configuration file {file} is not TOML: {error}") from error


def _explained(error: ValidationError) -> str:
    """One clause for each fault; values are not repeated, since a key may hold a secret."""
    clauses = []
    for fault in error.errors(include_url=False, include_context=False, include_input=False):
        key = ".".join(str(part) for part in fault["loc"]) or "configuration"
        if fault["type"] == "extra_forbidden":
            near = difflib.get_close_matches(str(fault["loc"][-1]), DriverConfig.model_fields, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            clauses.append(f"unknown key {key}{hint}")
        elif fault["type"] == "missing":
            clauses.append(f"{key} must be set")
        else:
            clauses.append(f"{key}: {fault['msg'].removeprefix('Value error, ')}")
    return "; ".join(clauses)
