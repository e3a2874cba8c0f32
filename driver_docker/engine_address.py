"""Finding the engine: what is configured, else the first place where one really answers.

In this order, the first that applies (compute-driver contract 5.2 item 1, and what Docker's own client does):

1. `socket_path`, with `docker_tls_*` for TCP: nothing else is tried;
2. `docker_context`: nothing else is tried;
3. `DOCKER_HOST`, with `DOCKER_TLS_VERIFY` and `DOCKER_CERT_PATH` for TCP;
4. `DOCKER_CONTEXT`, else the current context of `$DOCKER_CONFIG/config.json`, unless it is `default`;
5. the usual sockets: `/var/run/docker.sock`, `~/.docker/run/docker.sock`, `$XDG_RUNTIME_DIR/docker.sock`.

A Unix socket of 3 or 4 is the first candidate and 5 follows it. Any other address of 3 or 4 is the only one: a driver
that was pointed at another machine never falls back to this one. TLS variables mean nothing for a Unix socket.
"""

from __future__ import annotations

import grp
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

from driver_docker.docker_contexts import current_context, docker_config_dir, read_context
from driver_docker.engine import EngineError, EngineUnreachableError
from driver_docker.engine_docker import DockerEngine
from driver_docker.engine_ssh import SshTunnel, ssh_command
from driver_docker.engine_tls import EngineTls
from driver_docker.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from driver_docker.config import DriverConfig

_SCHEMES: Final = ("unix://", "tcp://", "ssh://", "http://", "https://")
_UNIX: Final = "unix://"
_SSH: Final = "ssh://"
_MAY_HOLD_AT: Final = ("/", _UNIX, _SSH)
_START_ONE: Final = "start the engine there, or name another with --docker-socket or --docker-context"
_FIRST_SOCKET: Final = Path("/var/run/docker.sock")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAddress:
    """One place where an engine may be."""

    url: str
    origin: str
    """Who says so, for error texts: `socket_path`, `DOCKER_HOST`, `context x`, `usual socket`."""
    tls: EngineTls | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A candidate that was tried, and why it cannot be used."""

    address: EngineAddress
    error: EngineError


def candidates(config: DriverConfig, environment: Mapping[str, str]) -> tuple[EngineAddress, ...]:
    """Addresses to try, in order, without repetition.

    Args:
        config: The driver's configuration.
        environment: The process's environment.

    Raises:
        ConfigurationError: An address is malformed, a context does not exist, or TLS is asked for without
            verification.
    """
    if config.socket_path is not None:
        tls = None
        if config.docker_tls_ca is not None:
            tls = EngineTls(ca=config.docker_tls_ca, certificate=config.docker_tls_cert, key=config.docker_tls_key)
        return (EngineAddress(url=as_address(config.socket_path), origin="socket_path", tls=tls),)
    if config.docker_context is not None:
        return (_of_context(config.docker_context, environment, named_by="docker_context"),)
    told = _told_by_environment(environment)
    if told is not None and not told.url.startswith(_UNIX):
        return (told,)
    found = [told] if told is not None else []
    found += [EngineAddress(url=f"{_UNIX}{path}", origin="usual socket") for path in _usual_sockets(environment)]
    unique: dict[str, EngineAddress] = {}
    for address in found:
        unique.setdefault(address.url, address)
    return tuple(unique.values())


def _told_by_environment(environment: Mapping[str, str]) -> EngineAddress | None:
    if host := environment.get("DOCKER_HOST"):
        url = as_address(host, what="DOCKER_HOST")
        return EngineAddress(url=url, origin="DOCKER_HOST", tls=_environment_tls(url, environment))
    name = environment.get("DOCKER_CONTEXT")
    if name and name != "default":
        return _of_context(name, environment, named_by="DOCKER_CONTEXT")
    name = current_context(environment) if not name else None
    if name is None:
        return None
    return _of_context(name, environment, named_by=str(docker_config_dir(environment) / "config.json"))


def _environment_tls(url: str, environment: Mapping[str, str]) -> EngineTls | None:
    if not url.startswith("tcp://"):
        return None
    if environment.get("DOCKER_TLS_VERIFY"):
        return EngineTls.in_folder(Path(environment.get("DOCKER_CERT_PATH") or docker_config_dir(environment)))
    if environment.get("DOCKER_TLS"):
        raise ConfigurationError(
            "DOCKER_TLS without DOCKER_TLS_VERIFY means TLS to an engine that is not verified, which this driver does "
            "not offer; set DOCKER_TLS_VERIFY=1 and DOCKER_CERT_PATH"
        )
    return None


def _of_context(name: str, environment: Mapping[str, str], *, named_by: str) -> EngineAddress:
    found = read_context(name, environment, named_by=named_by)
    return EngineAddress(
        url=as_address(found.host, what=f"context {name}"), origin=f"context {name} ({named_by})", tls=found.tls
    )


def _usual_sockets(environment: Mapping[str, str]) -> list[Path]:
    found = [_FIRST_SOCKET]
    if home := environment.get("HOME"):
        found.append(Path(home) / ".docker" / "run" / "docker.sock")
    if runtime := environment.get("XDG_RUNTIME_DIR"):
        found.append(Path(runtime) / "docker.sock")
    return found


def as_address(configured: str, *, what: str = "socket_path") -> str:
    """A configured socket path or address as an address.

    Raises:
        ConfigurationError: Neither an absolute path nor a known scheme, an ssh address without a host or with a port
            that is none, or with what may be a password, which is not quoted.
    """
    if "@" in configured and not configured.startswith(_MAY_HOLD_AT):
        # Addresses are told in logs and errors, and no engine is logged in to this way. Wherever it stands: a password
        # may hold a slash.
        raise ConfigurationError(f"{what} must not hold a user or password; name the host alone, and use TLS or ssh://")
    if configured.startswith(_SSH):
        try:
            ssh_command(configured, Path("/unused"))  # only for what it has against the address
        except ConfigurationError as error:
            raise ConfigurationError(f"{what}: {error.public_message}") from None
    if configured.startswith(_SCHEMES):
        return configured
    if configured.startswith("/"):
        return f"{_UNIX}{configured}"
    raise ConfigurationError(f"{what} {configured} must be an absolute path or start with unix://, tcp:// or ssh://")


async def connect(address: EngineAddress) -> DockerEngine:
    """Connect to one engine.

    Raises:
        EngineUnreachableError: Nobody answers there.
        EngineIncompatibleError: What answers cannot be used.
    """
    if not address.url.startswith(_SSH):
        return await DockerEngine.connect(address.url, tls=address.tls)
    tunnel = await SshTunnel.open(address.url)
    try:
        engine = await DockerEngine.connect(tunnel.local_url)
    except EngineError as error:
        await tunnel.close()
        # The operator knows the address, not the tunnel's end on this machine.
        raise type(error)(error.message.replace(tunnel.local_url, address.url)) from error
    except BaseException:
        await tunnel.close()
        raise
    engine.close_with(tunnel.close)
    return engine


async def try_all(addresses: tuple[EngineAddress, ...]) -> tuple[DockerEngine | None, tuple[Attempt, ...]]:
    """Connect to the first address that works.

    Returns:
        The engine, if any, and every candidate before it with why it could not be used.
    """
    failures: list[Attempt] = []
    for address in addresses:
        try:
            return await connect(address), tuple(failures)
        except EngineError as error:
            failures.append(Attempt(address=address, error=error))
    return None, tuple(failures)


def engine_cure(url: str) -> str:
    """What to do about a place where no engine could be used."""
    path = Path(url.removeprefix("unix://"))
    try:
        details = path.stat() if url.startswith("unix://") else None
    except OSError:
        details = None
    if details is not None and not os.access(path, os.R_OK | os.W_OK):
        try:
            group = grp.getgrgid(details.st_gid).gr_name
        except KeyError:
            group = str(details.st_gid)
        return f"the socket is not this user's to use: join its group ({group}), or run a rootless engine"
    return _START_ONE


async def find_engine(config: DriverConfig, environment: Mapping[str, str]) -> DockerEngine:
    """Connect to the engine.

    Args:
        config: The driver's configuration.
        environment: The process's environment.

    Raises:
        ConfigurationError: What is configured is malformed.
        EngineUnreachableError: Nobody answers; the text lists every place that was tried and why it failed.
        EngineIncompatibleError: The only candidate answers but cannot be used.
    """
    addresses = candidates(config, environment)
    engine, failures = await try_all(addresses)
    if engine is not None:
        address = addresses[len(failures)]
        structlog.get_logger("driver").info("engine answers", address=address.url, origin=address.origin)
        return engine
    told = [f"{failure.error.message} ({failure.address.origin})" for failure in failures]
    cures = dict.fromkeys(engine_cure(failure.address.url) for failure in failures)
    # A socket that is there says more than those that are not.
    cure = next((each for each in cures if each != _START_ONE), _START_ONE)
    if len(failures) == 1:
        error = failures[0].error
        raise type(error)(f"{told[0]}; {cure}") if isinstance(error, EngineUnreachableError) else error
    raise EngineUnreachableError(f"no Docker Engine found: {'; '.join(told)}; {cure}")


def engine_is_local(config: DriverConfig, environment: Mapping[str, str] | None = None) -> bool:
    """Whether the engine's files are, as far as its address tells, the files of this host. Blocks; reads small files.

    Args:
        config: The driver's configuration.
        environment: The process's environment.
    """
    try:
        addresses = candidates(config, os.environ if environment is None else environment)
    except ConfigurationError:
        return False
    return all(address.url.startswith(_UNIX) for address in addresses)
