"""The driver's configuration: one model, unknown keys refused. Where it comes from is `config_sources`' subject.

Keys and defaults follow compute-driver contract 7.3; others are our own. A key that exists in the contract but
is not offered by this driver is read, so that its name is known, and refused when it is set.
"""

from __future__ import annotations

import ipaddress
import logging
import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from driver_docker.compatibility import CompatibilityMode
from driver_docker.handshake import OlderGateways
from driver_docker.http_address import check_http_address
from driver_docker.image_reference import ImageReferenceError, parse_reference
from driver_docker.isolation_backends import IsolationBackendTable, RegisteredBackend, check_selectable
from driver_docker.upstream_proxy import ProxyKeys, check_proxy, check_spiffe_socket
from driver_docker.workspace import is_plain_path
from openshell.isolation.documents import BUILT_IN_BACKEND

DEFAULT_REQUIRED_LABELS: Final = {
    "openshell.ai/sandbox-attachable": "true",
    "openshell.ai/sandbox-attachable-workspace": "${workspace}",
}
_RESERVED_ADMISSION_KEYS: Final = frozenset(
    {"openshell.ai/managed-by", "openshell.ai/gateway-id", "openshell.ai/sandbox-workspace"}
)
DEFAULT_SECURE_ENDPOINT: Final = "https://127.0.0.1:17670"
"""Where supervisors reach the gateway when `guest_tls_ca` is all that is said of it."""
WORKSPACE_PLACEHOLDER: Final = "${workspace}"
_LABEL_VALUE: Final = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
_LABEL_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_LABEL_PREFIX: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_NOT_OFFERED: Final = {
    "supervisor_bin": "name an image with sandbox_runtime_image instead",
    "guest_tls_cert": "only guest_tls_ca is used in the split topology",
    "guest_tls_key": "only guest_tls_ca is used in the split topology",
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
    """Threshold of the driver's own log and of the containers' `OPENSHELL_LOG_LEVEL`.

    The words are those that gateways and other components know, since the variable is everybody's; `warning` is taken
    too.
    """

    TRACE = "trace"
    DEBUG = "debug"
    INFO = "info"
    WARN = "warn"
    ERROR = "error"

    @classmethod
    def _missing_(cls, value: object) -> LogLevel | None:
        return cls.WARN if value == "warning" else None

    @property
    def own(self) -> int:
        """The level in Python's logging, which knows nothing below debug."""
        return logging.DEBUG if self is LogLevel.TRACE else logging.getLevelNamesMapping()[self.value.upper()]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True)


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
            if value != WORKSPACE_PLACEHOLDER and not _LABEL_VALUE.fullmatch(value):
                raise ValueError(f"the value of {key!r} is no label value; {WORKSPACE_PLACEHOLDER} must stand alone")
        fixed = [value for value in self.required_labels.values() if value != WORKSPACE_PLACEHOLDER]
        if self.enabled and not fixed:
            raise ValueError("at least one required label must have a fixed value while admission is enabled")
        return self


class DriverConfig(_Table):
    """Everything that decides how this driver behaves."""

    bind_socket: Path
    """Where the driver serves: absolute path of a Unix socket, in a folder that is its user's alone."""
    state_dir: Path
    """Folder of records, absolute, owner-only within; default `$XDG_STATE_HOME/openshell/docker-sandbox-tokens`."""
    socket_path: str | None = None
    """Docker's API socket or a `unix://`, `tcp://`, `ssh://` address; found by itself when absent."""
    docker_context: str | None = None
    """Name of a Docker context that holds the engine's address and certificates; not beside `socket_path`."""
    docker_tls_ca: Path | None = None
    """CA that signed the engine's certificate, for a `tcp://` `socket_path`."""
    docker_tls_cert: Path | None = None
    """Client certificate for a `tcp://` `socket_path`; together with `docker_tls_key`."""
    docker_tls_key: Path | None = None
    """Key of the client certificate."""
    sandbox_label: str = "default"
    """The namespace that separates this driver's containers from those of others on the same engine."""
    grpc_endpoint: str = "http://127.0.0.1:17670"
    """Where supervisors reach the gateway; by default with `https` where `guest_tls_ca` is set."""
    default_image: str = "nvcr.io/nvidia/base/ubuntu:24.04"
    """Workload image where the caller names none."""
    image_pull_policy: PullPolicy = PullPolicy.IF_NOT_PRESENT
    """When images are pulled: `always`, `if_not_present` or `never`."""
    sandbox_runtime_image: str = "ghcr.io/nvidia/openshell/sandbox:0.1.5"
    """Image that holds the sandbox runtime, which every workload container gets read-only."""
    supervisor_image: str = "ghcr.io/nvidia/openshell/supervisor:0.1.5"
    """Image of the control supervisor."""
    guest_tls_ca: Path | None = None
    """PEM file of the CA that supervisors trust for an https `grpc_endpoint`; needed there, refused otherwise."""
    ssh_socket_path: str = "/run/openshell/ssh.sock"
    """The supervisor's `OPENSHELL_SSH_SOCKET_PATH`, an absolute path in its container."""
    sandbox_pids_limit: Annotated[int, Field(ge=1, le=2**31 - 1)] = 2048
    """Most processes and threads in a workload container."""
    app_armor_profile: str | None = None
    """AppArmor profile of workload containers: `Unconfined`, `RuntimeDefault` or `Localhost/<name>`."""
    allow_driver_config: bool = False
    """Whether callers may send a `driver_config`; must equal the gateway's setting."""
    resource_admission: ResourceAdmission = Field(default_factory=ResourceAdmission)
    """Which volumes a sandbox may attach, by their labels; must equal the gateway's setting."""
    enable_bind_mounts: bool = False
    """Whether callers may mount folders of the host; needs `resource_admission.enabled = false` as well."""
    https_proxy: str | None = None
    """Upstream proxy of every supervisor, `http://host:port` or `https://host:port`, without credentials."""
    no_proxy: str | None = None
    """Destinations that a supervisor reaches without the proxy, separated by commas."""
    proxy_auth_file: Path | None = None
    """File with the proxy's credentials; its content is staged for the supervisor and shown nowhere."""
    proxy_auth_allow_insecure: bool = False
    """Whether the credentials may be sent to an `http://` proxy."""
    proxy_connect_by_hostname: bool = False
    """Whether the proxy resolves names; otherwise it is sent addresses."""
    proxy_ca_bundle: Path | None = None
    """PEM file of CAs that the proxy's certificates are checked against."""
    provider_spiffe_workload_api_socket: str | None = None
    """Socket of the SPIFFE Workload API; its folder is shown to the supervisor, read-only."""
    telemetry_enabled: bool = False
    """The containers' `OPENSHELL_TELEMETRY_ENABLED`."""
    log_level: LogLevel = LogLevel.INFO
    """Threshold of the driver's log and of the containers': `trace`, `debug`, `info`, `warn` or `error`."""

    gateway_manages_lifecycle: bool = True
    """Whether the gateway stops and starts all sandboxes around its own restarts."""
    older_gateways: OlderGateways = OlderGateways.REFUSE
    """What becomes of a gateway of the older generation, which does not introduce itself: `refuse` or `serve`."""
    compatibility: CompatibilityMode = CompatibilityMode.ENFORCE
    """What becomes of gateway, supervisor and runtime revisions that do not fit: `enforce` refuses, `warn` logs."""
    isolation_backend: str | None = None
    """Name of the isolation backend of new sandboxes; absent or `openshell-sandbox`: the built-in one."""
    isolation_backends: IsolationBackendTable = Field(default_factory=dict)
    """Backends that the operator registered, by name: an endpoint, and whose certificate to trust there."""
    staging: Staging = Staging.LEAN
    """How supervisor files are staged: `lean` (through the supervisor itself) or `upstream` (through a helper)."""
    public_detail: PublicDetail = PublicDetail.LAST_LINE
    """What a condition may quote of a supervisor's log: `last-line` or `none`."""
    start_concurrency: Annotated[int, Field(ge=1, le=64)] = 6
    """How many sandboxes are launched at a time."""
    stop_grace_seconds: Annotated[int, Field(ge=0, le=600)] = 10
    """Seconds that a workload has to end by itself when it is stopped."""
    supervisor_stop_grace_seconds: Annotated[int, Field(ge=0, le=600)] = 5
    """Seconds that a supervisor has to end by itself when it is stopped."""
    resync_interval_seconds: Annotated[float, Field(ge=1.0, le=3600.0)] = 60.0
    """Seconds between two looks at every container, although events are read."""
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port of 127.0.0.1 with Prometheus metrics; 0 takes a free one; nothing is served when absent."""

    supervisor_bin: str | None = None
    """Refused: name an image with `sandbox_runtime_image`."""
    guest_tls_cert: str | None = None
    """Refused: only `guest_tls_ca` is used."""
    guest_tls_key: str | None = None
    """Refused: only `guest_tls_ca` is used."""

    @field_validator("sandbox_label")
    @classmethod
    def _label(cls, value: str) -> str:
        if not value or not _LABEL_VALUE.fullmatch(value):
            raise ValueError("must be 1 to 63 of A-Z a-z 0-9 _ . - and start and end with a letter or digit")
        return value

    @field_validator("default_image", "sandbox_runtime_image", "supervisor_image")
    @classmethod
    def _image(cls, value: str) -> str:
        try:
            parse_reference(value)
        except ImageReferenceError as error:
            raise ValueError(f"must be an image reference: {error.why}") from None
        return value

    @field_validator("state_dir")
    @classmethod
    def _state_dir(cls, value: Path) -> Path:
        if not value.is_absolute():
            raise ValueError("must be an absolute path: every command must find the same records from any folder")
        return value

    @field_validator("ssh_socket_path")
    @classmethod
    def _ssh_socket(cls, value: str) -> str:
        if not is_plain_path(value):
            raise ValueError("must be an absolute, normalised path in the supervisor's container")
        return value

    @field_validator("app_armor_profile")
    @classmethod
    def _app_armor(cls, value: str | None) -> str | None:
        if value is None or value in {"Unconfined", "RuntimeDefault"} or re.fullmatch(r"Localhost/[\w.-]+", value):
            return value
        raise ValueError("must be Unconfined, RuntimeDefault or Localhost/<name>")

    @field_validator("provider_spiffe_workload_api_socket")
    @classmethod
    def _spiffe(cls, value: str | None) -> str | None:
        return check_spiffe_socket(value) if value is not None else None

    @field_validator("grpc_endpoint")
    @classmethod
    def _endpoint(cls, value: str) -> str:
        check_http_address(value)
        if urlsplit(value).port is None:
            raise ValueError("must name a port")
        return value

    @model_validator(mode="before")
    @classmethod
    def _default_endpoint(cls, values: Any) -> Any:
        """The gateway on this machine, encrypted where its CA is known (compute-driver contract 5.2 item 3)."""
        if isinstance(values, dict) and values.get("grpc_endpoint") is None and values.get("guest_tls_ca") is not None:
            return values | {"grpc_endpoint": DEFAULT_SECURE_ENDPOINT}
        return values

    @model_validator(mode="after")
    def _together(self) -> Self:
        for key, advice in _NOT_OFFERED.items():
            if getattr(self, key):
                raise ValueError(f"{key} is not supported by this driver: {advice}")
        self._check_engine()
        try:
            check_selectable(self.isolation_backends, self.backend_name)
        except ValueError as error:
            raise ValueError(f"isolation_backend: {error}") from None
        check_proxy(
            ProxyKeys(
                https_proxy=self.https_proxy,
                no_proxy=self.no_proxy,
                proxy_auth_file=self.proxy_auth_file,
                proxy_auth_allow_insecure=self.proxy_auth_allow_insecure,
                proxy_connect_by_hostname=self.proxy_connect_by_hostname,
                proxy_ca_bundle=self.proxy_ca_bundle,
            )
        )
        secure = urlsplit(self.grpc_endpoint).scheme == "https"
        if secure and self.guest_tls_ca is None:
            raise ValueError("guest_tls_ca is needed for an https grpc_endpoint")
        if not secure and self.guest_tls_ca is not None:
            raise ValueError("guest_tls_ca is refused for an http grpc_endpoint")
        return self

    def _check_engine(self) -> None:
        if self.docker_context is not None and self.socket_path is not None:
            raise ValueError("docker_context and socket_path exclude each other: set the one that names the engine")
        if (self.docker_tls_cert is None) is not (self.docker_tls_key is None):
            raise ValueError("docker_tls_cert and docker_tls_key belong together: set both or none")
        if self.docker_tls_cert is not None and self.docker_tls_ca is None:
            raise ValueError("docker_tls_ca is needed beside docker_tls_cert, so that the engine is verified too")
        if self.docker_tls_ca is not None and not (self.socket_path or "").startswith("tcp://"):
            raise ValueError("docker_tls_ca is used only with a tcp:// socket_path")

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
    def backend_name(self) -> str:
        """Name of the isolation backend that new sandboxes are admitted with."""
        return self.isolation_backend or BUILT_IN_BACKEND

    @property
    def delegated_backend(self) -> RegisteredBackend | None:
        """The selected backend of the operator's table; `None` for the built-in one."""
        return None if self.backend_name == BUILT_IN_BACKEND else self.isolation_backends[self.backend_name]

    @property
    def namespace_dir(self) -> Path:
        """Where the records of this driver's namespace are."""
        return self.state_dir / self.sandbox_label
