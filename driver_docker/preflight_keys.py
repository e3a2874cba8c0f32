"""`check` of keys that need something beside them: another key, a file, a folder, the engine, a running driver."""

from __future__ import annotations

import errno
import socket
import stat
from typing import TYPE_CHECKING, Final

from driver_docker.bind_socket import listens
from driver_docker.errors import ConfigurationError, DriverError
from driver_docker.findings import Finding, fault, hint, ok
from driver_docker.isolation_backends import check_placeable
from driver_docker.metrics import LOOPBACK
from driver_docker.supervisor_files import read_delegation

if TYPE_CHECKING:
    from pathlib import Path

    from driver_docker.config import DriverConfig
    from driver_docker.engine_host import HostFacts

_HEALTH_SECONDS: Final = 2.0
_BUILT_IN_PROFILES: Final = (None, "RuntimeDefault", "Unconfined")


def judge_backend(config: DriverConfig, *, is_local: bool) -> list[Finding]:
    """The selected isolation backend; nothing for the built-in one.

    Args:
        config: The configuration.
        is_local: Whether the engine runs on this machine.
    """
    backend = config.delegated_backend
    if backend is None:
        return []
    try:
        check_placeable(backend, engine_is_local=is_local)
        read_delegation(config)
    except DriverError as error:
        return [fault("isolation_backend", error.public_message, "correct its registration; every launch needs it")]
    return [ok("isolation_backend", f"{backend.name} can be placed, and its certificate can be checked")]


def judge_app_armor(config: DriverConfig, host: HostFacts) -> list[Finding]:
    """The AppArmor profile of workloads; nothing where none is named."""
    profile = config.app_armor_profile
    if profile is None:
        return []
    if "apparmor" not in host.security_options:
        text = f"{profile} is set, and the engine has no AppArmor: it refuses the container, or applies no profile"
        return [fault("app_armor_profile", text, "leave app_armor_profile out, or use an engine with AppArmor")]
    if profile in _BUILT_IN_PROFILES:
        return [ok("app_armor_profile", profile)]
    return [
        hint(
            "app_armor_profile",
            f"whether {profile} is loaded, only the engine's machine knows",
            f"there: aa-status lists {profile.removeprefix('Localhost/')}, or load it with apparmor_parser",
        )
    ]


def judge_metrics_port(config: DriverConfig) -> list[Finding]:
    """Whether metrics can be served where they are wanted; nothing where they are not, or on any free port."""
    if not config.metrics_port:
        return []
    place = f"{LOOPBACK}:{config.metrics_port}"
    with socket.socket() as probe:
        # As the server does: a connection that just ended does not keep the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, config.metrics_port))
        except OSError as error:
            told = f"{place} cannot be used: {error.strerror}"
            if error.errno == errno.EADDRINUSE and _is_served(config.bind_socket):
                return [hint("metrics_port", told, "by the driver that serves already, if it has the same port")]
            return [fault("metrics_port", told, "end what serves there, or choose another --metrics-port")]
    return [ok("metrics_port", f"{place} is free")]


def _is_served(path: Path) -> bool:
    try:
        return listens(path)
    except (ConfigurationError, OSError):
        return False


def judge_bind_mounts(config: DriverConfig) -> list[Finding]:
    """Whether mounts of the host's folders are enabled by all keys that they need; nothing where they are off."""
    if not config.enable_bind_mounts:
        return []
    missing = [
        text
        for text, there in (
            ("allow_driver_config = true", config.allow_driver_config),
            ("resource_admission.enabled = false", not config.resource_admission.enabled),
        )
        if not there
    ]
    if not missing:
        return [ok("enable_bind_mounts", "callers may mount folders of the host")]
    return [
        hint(
            "enable_bind_mounts",
            "set, and refused all the same",
            f"set {' and '.join(missing)} too, here and at the gateway, or leave enable_bind_mounts out",
        )
    ]


async def judge_running_driver(socket: Path) -> list[Finding]:
    """What a driver that serves on the socket says of its health; nothing where nobody does."""
    if not _is_socket(socket):
        return []
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

    from driver_docker.serving_health import COMPUTE_DRIVER

    request = health_pb2.HealthCheckRequest(service=COMPUTE_DRIVER)
    async with grpc.aio.insecure_channel(f"unix:{socket}") as channel:
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=_HEALTH_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                return []  # left from a driver that ended, as the row of the socket says
            text = f"who serves on {socket} does not tell its health ({error.code().name})"
            return [hint("driver", text, "is it this driver? Not Docker's socket, and no gateway's")]
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return [ok("driver", "it runs and observes its engine")]
    return [hint("driver", "it runs and does not reach its engine now", "see the rows of the engine, and its log")]


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.stat().st_mode)
    except OSError:  # `Path.is_socket` passes some of these on, such as a folder that may not be searched
        return False
