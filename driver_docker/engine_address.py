"""Finding the engine: what is configured, else the first place where one really answers (contract 5.2 item 1)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from driver_docker.engine import EngineError, EngineUnreachableError
from driver_docker.engine_docker import DockerEngine
from driver_docker.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

_SCHEMES = ("unix://", "tcp://", "ssh://", "http://", "https://")


def candidates(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Addresses to try where none is configured, in order, without repetition.

    Args:
        environment: The process's environment.
    """
    found = []
    if (host := environment.get("DOCKER_HOST", "")).startswith("unix://"):
        found.append(host)
    found.append("unix:///var/run/docker.sock")
    if home := environment.get("HOME"):
        found.append(f"unix://{Path(home) / '.docker' / 'run' / 'docker.sock'}")
    if runtime := environment.get("XDG_RUNTIME_DIR"):
        found.append(f"unix://{Path(runtime) / 'docker.sock'}")
    return tuple(dict.fromkeys(found))


def as_address(configured: str) -> str:
    """A configured socket path or address as an address.

    Raises:
        ConfigurationError: Neither an absolute path nor a known scheme.
    """
    if configured.startswith(_SCHEMES):
        return configured
    if configured.startswith("/"):
        return f"unix://{configured}"
    raise ConfigurationError(
        f"socket_path {configured} must be an absolute path or start with unix://, tcp:// or ssh://"
    )


async def find_engine(configured: str | None, environment: Mapping[str, str]) -> DockerEngine:
    """Connect to the engine.

    Args:
        configured: The configured address; nothing else is tried when it is given.
        environment: The process's environment.

    Raises:
        EngineUnreachableError: Nobody answers; the text lists every place that was tried and why it failed.
        EngineIncompatibleError: The configured address answers but cannot be used.
    """
    if configured is not None:
        return await DockerEngine.connect(as_address(configured))
    failures = []
    for address in candidates(environment):
        try:
            return await DockerEngine.connect(address)
        except EngineError as error:
            failures.append(error.message)
    raise EngineUnreachableError(
        f"no Docker Engine found: {'; '.join(failures)}; start one or name its socket with --docker-socket"
    )
