"""Configuration of the embedded gateway: checked once, unknown keys refused, errors that name the key."""

from __future__ import annotations

import ipaddress
import json
import os
import re
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, field_validator

from openshell.isolation.endpoints import MAX_SOCKET_PATH_BYTES

DEFAULT_REQUIRED_LABELS = {
    "openshell.ai/sandbox-attachable": "true",
    "openshell.ai/sandbox-attachable-workspace": "${workspace}",
}
"""Labels that a volume needs before a sandbox may attach it (compute-driver contract 3.2)."""


class ResourceAdmission(BaseModel):
    """Which host resources a caller may attach (compute-driver contract 3.2)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    enabled: bool = True
    required_labels: dict[str, str] = Field(default_factory=lambda: dict(DEFAULT_REQUIRED_LABELS))


class DriverPolicy(BaseModel):
    """The policy that a driver must acknowledge before the gateway uses it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    allow_driver_config: bool = False
    resource_admission: ResourceAdmission = Field(default_factory=ResourceAdmission)

    def acknowledgement(self) -> str:
        """The exact text that a driver with this policy answers."""
        return "v1:" + json.dumps(self.model_dump(), sort_keys=True, separators=(",", ":"))


class Deadlines(BaseModel):
    """Time limits of a provisioning attempt, in seconds (isolation contract 5.5)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    preparation_seconds: float = Field(default=1800.0, gt=0)
    """From the create request to the supervisor's first authenticated report; absolute."""
    cleanup_stop_seconds: float = Field(default=30.0, gt=0)
    """Limit of the driver's stop after an expired attempt."""
    cleanup_retry_seconds: float = Field(default=5.0, gt=0)
    """Wait before such a stop is tried again."""


class DriverTimings(BaseModel):
    """How patiently the driver's socket is used, in seconds (compute-driver contract 3.14)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dial_window_seconds: float = Field(default=30.0, gt=0)
    watch_reopen_seconds: float = Field(default=2.0, ge=0)
    reconcile_interval_seconds: float = Field(default=60.0, gt=0)
    orphan_grace_seconds: float = Field(default=300.0, ge=0)
    inspect_seconds: float = Field(default=10.0, gt=0)
    """Limit of the read that follows a failed driver operation."""


class GatewayConfig(BaseModel):
    """Everything the gateway process is started with."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    listen_host: str = "127.0.0.1"
    listen_port: int = Field(default=17670, ge=0, le=65535)
    state_dir: Path
    store_url: str = ""
    """SQLAlchemy URL of the store; empty means SQLite in the state folder."""
    compute_driver: str = "docker"
    compute_driver_socket: Path
    name: str = "local"
    client_config_dir: Path | None = None
    """Root of the clients' configuration to register in; nothing leaves it alone."""
    driver_policy: DriverPolicy = Field(default_factory=DriverPolicy)
    deadlines: Deadlines = Field(default_factory=Deadlines)
    driver_timings: DriverTimings = Field(default_factory=DriverTimings)
    token_lifetime_seconds: int = Field(default=3600, ge=60, le=3600)
    nonexpiring_gateway_tokens: bool = False
    """Whether supervisors get a gateway token that never expires, so that they outlive any absence of the gateway. A
    token is worthless once its sandbox is deleted or launched anew, with or without this."""
    heartbeat_interval_seconds: float = Field(default=10.0, gt=0)
    stop_sandboxes_on_exit: bool = False
    """Stop running sandboxes at exit when the driver lets the gateway manage their lifecycle. Off until this gateway
    can start them again: a stopped sandbox could not come back."""

    @field_validator("listen_host")
    @classmethod
    def _only_loopback(cls, host: str) -> str:
        try:
            loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
        except ValueError:
            loopback = False
        if not loopback:
            raise ValueError(
                f"{host!r} is not a loopback address; users of this gateway carry no token, "
                "so it listens on loopback only"
            )
        return host

    @field_validator("compute_driver")
    @classmethod
    def _driver_name(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,63}", name, re.ASCII):
            raise ValueError("a driver's name has ASCII letters, digits, '-' and '_' only")
        return name.lower()

    @field_validator("name")
    @classmethod
    def _gateway_name(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,63}", name, re.ASCII):
            raise ValueError("a gateway's name has ASCII letters, digits, '-' and '_' only")
        return name

    @field_validator("compute_driver_socket")
    @classmethod
    def _socket_path(cls, path: Path) -> Path:
        if not path.is_absolute():
            path = Path.cwd() / path
        length = len(os.fsencode(path))
        if length > MAX_SOCKET_PATH_BYTES:
            raise ValueError(
                f"the socket path has {length} bytes, a Unix socket takes at most {MAX_SOCKET_PATH_BYTES}; shorten it"
            )
        return path

    def endpoint(self, port: int) -> str:
        """The URL under which clients reach the gateway on its bound port."""
        host = f"[{self.listen_host}]" if ":" in self.listen_host else self.listen_host
        return f"http://{host}:{port}"

    def effective_store_url(self) -> str:
        """The URL of the store: the configured one, else a SQLite file in the state folder."""
        return self.store_url or f"sqlite:///{self.state_dir / 'gateway.sqlite3'}"
