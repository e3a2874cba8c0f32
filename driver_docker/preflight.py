"""`check`: looks at everything that a driver needs, changes nothing, and has each fault judged by `findings`."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import ssl
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from driver_docker.bind_socket import check_path, listens
from driver_docker.config import PullPolicy
from driver_docker.config_sources import SHARED_SOCKET_VARIABLE, variables_of
from driver_docker.engine import EngineAbsentError, EngineError
from driver_docker.engine_address import candidates, engine_cure, try_all
from driver_docker.errors import ConfigurationError, DriverError
from driver_docker.findings import (
    Finding,
    fault,
    hint,
    judge_endpoint,
    judge_engine,
    judge_image,
    judge_kernel,
    judge_revisions,
    ok,
)
from driver_docker.image_reference import parse_reference
from driver_docker.platforms import check_platform
from driver_docker.preflight_keys import (
    judge_app_armor,
    judge_backend,
    judge_bind_mounts,
    judge_metrics_port,
    judge_running_driver,
)
from driver_docker.regular_file import read_regular
from driver_docker.supervisor_files import SupervisorFileError, read_supervisor_files

if TYPE_CHECKING:
    from collections.abc import Mapping

    from driver_docker.config import DriverConfig
    from driver_docker.engine_docker import DockerEngine
    from driver_docker.engine_host import HostFacts
    from driver_docker.engine_objects import ImageFacts

_LISTEN_SECONDS: Final = 2.0
_LANDLOCK_CREATE_RULESET: Final = 444
_LANDLOCK_VERSION_FLAG: Final = 1
_OTHERS: Final = 0o077
_SECCOMP_ACTIONS: Final = Path("/proc/sys/kernel/seccomp/actions_avail")


async def run_preflight(config: DriverConfig, environment: Mapping[str, str]) -> list[Finding]:
    """Look at engine, kernel, images, folders, socket and endpoint.

    Args:
        config: A configuration that could be loaded.
        environment: The process's environment.
    """
    findings = judge_socket(config, environment)
    findings.append(judge_state_dir(config))
    if config.guest_tls_ca is not None:
        findings.append(judge_ca(config.guest_tls_ca))
    findings += judge_supervisor_files(config)
    findings += judge_bind_mounts(config)
    findings += await judge_running_driver(config.bind_socket)
    findings += judge_metrics_port(config)
    try:
        addresses = candidates(config, environment)
    except ConfigurationError as error:
        findings.append(fault("engine", error.public_message, "correct the address of the engine"))
        return [*findings, await _endpoint(config, None, is_local=True)]
    engine, failures = await try_all(addresses)
    for failure in failures:
        words = f"{failure.error.public_message} ({failure.address.origin})"
        cure = engine_cure(failure.address.url)
        # A place that does not answer matters only where no later one does.
        findings.append((hint if engine is not None else fault)("engine", words, cure))
    if engine is None:
        return [*findings, await _endpoint(config, None, is_local=True)]
    address = addresses[len(failures)]
    async with engine:
        findings.append(ok("engine", f"{address.url} ({address.origin})"))
        if address.url.startswith("tcp://") and address.tls is None:
            findings.append(
                hint(
                    "engine connection",
                    "neither encrypted nor authenticated: whoever reaches it owns the engine's machine",
                    "use TLS (docker_tls_ca, docker_tls_cert, docker_tls_key), ssh:// or a Unix socket",
                )
            )
        try:
            host = await engine.describe()
        except EngineError as error:
            findings.append(fault("engine", error.public_message, "see the engine's own log"))
            return findings
        is_local = address.url.startswith("unix://") and host.kernel_version == os.uname().release
        findings += judge_engine(engine.info, host)
        findings += judge_kernel(is_local=is_local, landlock_abi=landlock_abi(), seccomp_actions=seccomp_actions())
        findings += judge_app_armor(config, host)
        findings += judge_backend(config, is_local=is_local)
        findings += await _images(engine, config)
    findings.append(await _endpoint(config, host, is_local=is_local))
    return findings


async def _images(engine: DockerEngine, config: DriverConfig) -> list[Finding]:
    wanted = (
        ("supervisor_image", config.supervisor_image, "supervisor"),
        ("sandbox_runtime_image", config.sandbox_runtime_image, "runtime"),
        ("default_image", config.default_image, ""),
    )
    findings = []
    here: dict[str, ImageFacts] = {}
    for check, reference, component in wanted:
        try:
            facts = here[check] = await engine.inspect_image(parse_reference(reference).local)
            check_platform(reference, facts, engine.info)
        except EngineAbsentError:
            pass
        except DriverError as error:
            findings.append(fault(check, error.public_message, "correct the reference"))
            continue
        may_pull = config.image_pull_policy is not PullPolicy.NEVER
        findings.append(judge_image(check, reference, here.get(check), may_pull=may_pull, component=component))
    findings.append(
        judge_revisions(config, supervisor=here.get("supervisor_image"), runtime=here.get("sandbox_runtime_image"))
    )
    return findings


async def _endpoint(config: DriverConfig, host: HostFacts | None, *, is_local: bool) -> Finding:
    listening = await _listens(config.grpc_endpoint) if is_local else None
    return judge_endpoint(config, host, is_local=is_local, listening=listening)


async def _listens(endpoint: str) -> bool:
    parts = urlsplit(endpoint)
    try:
        async with asyncio.timeout(_LISTEN_SECONDS):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True


def judge_socket(config: DriverConfig, environment: Mapping[str, str]) -> list[Finding]:
    """The place that the driver serves on: length, folder, and who is there already."""
    path = config.bind_socket
    findings = []
    own, *shared = variables_of("bind_socket")
    taken = [name for name in shared if environment.get(name) == str(path)]
    if taken and not environment.get(own):
        findings.append(
            hint(
                "bind_socket",
                f"taken from {SHARED_SOCKET_VARIABLE}, which a gateway reads too, as the place where it dials",
                f"set {own} or --bind-socket, so that neither process picks up the other's setting",
            )
        )
    try:
        check_path(path)
    except ConfigurationError as error:
        return [*findings, fault("bind_socket", error.public_message, "choose a shorter, absolute --bind-socket")]
    problem = folder_problem(path.parent)
    if problem is not None:
        return [*findings, fault("bind_socket", problem, folder_cure(path.parent, "--bind-socket"))]
    if not path.parent.exists():
        return [*findings, _judge_new_folder(path)]
    if not path.exists():
        return [*findings, ok("bind_socket", f"{path} is free")]
    if not path.is_socket():
        return [
            *findings,
            fault("bind_socket", f"{path} is there and is no socket", "remove it, or choose another path"),
        ]
    try:
        is_taken = listens(path)
    except ConfigurationError as error:
        return [*findings, fault("bind_socket", error.public_message, "look who holds it: the driver does not take it")]
    if not is_taken:
        return [*findings, ok("bind_socket", f"{path} is left from a driver that ended; it is replaced")]
    return [*findings, hint("bind_socket", f"somebody serves on {path} already", "a second driver there is refused")]


def _judge_new_folder(path: Path) -> Finding:
    """A socket whose folder the driver is to make."""
    parent = next(parent for parent in path.parent.parents if parent.exists())
    if parent == Path("/"):
        return hint(
            "bind_socket",
            f"{path.parent} would be made in the root folder: was a variable in it empty, such as XDG_RUNTIME_DIR?",
            "name a socket in a folder of this user's own, such as /run/openshell-driver or ~/.openshell-driver",
        )
    if not os.access(parent, os.W_OK | os.X_OK):
        cure = "choose a --bind-socket in a folder of this user's own"
        return fault("bind_socket", f"{path.parent} cannot be made in {parent}", cure)
    return ok("bind_socket", f"{path} is free; its folder is made at the first start")


def judge_state_dir(config: DriverConfig) -> Finding:
    """The folder of records."""
    folder = config.namespace_dir
    problem = folder_problem(folder)
    if problem is not None:
        return fault("state_dir", problem, folder_cure(folder, "--state-dir"))
    if not folder.exists():
        parent = next(parent for parent in folder.parents if parent.exists())
        if not os.access(parent, os.W_OK | os.X_OK):
            return fault("state_dir", f"{folder} cannot be made in {parent}", "choose a --state-dir of this user's own")
        return ok("state_dir", f"{folder} is made at the first start")
    return ok("state_dir", str(folder))


def folder_problem(folder: Path) -> str | None:
    """Why a folder is not its user's alone; `None` where it is, or does not exist yet."""
    try:
        details = folder.lstat()
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{folder} cannot be looked at: {error.strerror}"
    if not stat.S_ISDIR(details.st_mode):
        return f"{folder} is no folder, or a link"
    if details.st_uid != os.geteuid():
        return f"{folder} belongs to user {details.st_uid}, not to {os.geteuid()}"
    if details.st_mode & _OTHERS:
        return f"{folder} is open to others (mode {stat.S_IMODE(details.st_mode):04o})"
    return None


def folder_cure(folder: Path, flag: str) -> str:
    """What to do about a folder that is not its user's alone."""
    own = f"choose a {flag} in a folder of this user's own"
    try:
        is_own = folder.lstat().st_uid == os.geteuid()
    except OSError:
        is_own = False
    return f"chmod 700 {folder}, or {own}" if is_own else f"{own}, or run as the user whose folder it is"


def judge_ca(file: Path) -> Finding:
    """The CA that supervisors trust for the gateway."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=read_regular(file).decode("ascii"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "no PEM certificate"
        return fault(
            "guest_tls_ca", f"{file}: {reason}", "name a PEM file of the CA that signed the gateway's certificate"
        )
    return ok("guest_tls_ca", str(file))


def judge_supervisor_files(config: DriverConfig) -> list[Finding]:
    """The operator's files and folders that every supervisor is given; nothing where none is configured."""
    if config.https_proxy is None and config.provider_spiffe_workload_api_socket is None:
        return []
    try:
        read_supervisor_files(config)
    except SupervisorFileError as error:
        return [fault("supervisor files", error.public_message, "correct the key or the file; every launch reads it")]
    return [ok("supervisor files", "those that the configuration names can be read")]


def landlock_abi() -> int | None:
    """The Landlock ABI of this kernel; `None` where it has none."""
    libc = ctypes.CDLL(None, use_errno=True)
    answer: int = libc.syscall(_LANDLOCK_CREATE_RULESET, None, 0, _LANDLOCK_VERSION_FLAG)
    return answer if answer > 0 else None


def seccomp_actions() -> tuple[str, ...]:
    """The seccomp actions of this kernel; empty where it does not say."""
    try:
        return tuple(_SECCOMP_ACTIONS.read_text("ascii").split())
    except OSError:
        return ()
