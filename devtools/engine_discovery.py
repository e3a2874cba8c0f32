"""Finding a Docker Engine that answers.

Candidates, in this order: ``DOCKER_HOST``; the active docker context (``DOCKER_CONTEXT``, else ``currentContext`` of
the client's configuration in ``DOCKER_CONFIG`` or ``~/.docker``); ``/var/run/docker.sock``;
``~/.docker/run/docker.sock``; ``$XDG_RUNTIME_DIR/docker.sock``. A socket file says nothing about an engine behind it:
only an answer to the API's ping does, and only one that is Docker's own. ``DOCKER_HOST`` is a decision of the user's,
so nothing else is tried where it is set. The ambient TLS variables concern tcp addresses alone, which are not used
here.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

PING_TIMEOUT_SECONDS = 5.0
MINIMUM_API = (1, 41)
NO_SOCKET = "no such socket"
_SYSTEM_SOCKET = "/var/run/docker.sock"
_UNIX = "unix://"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An address that might be an engine's, and where it was found."""

    address: str
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A candidate that is not used, and why."""

    address: str
    origin: str
    reason: str

    def __str__(self) -> str:
        return f"{self.address or '-'} ({self.origin}): {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundEngine:
    """The outcome of a search: an address, or why every candidate was skipped."""

    address: str | None
    origin: str
    skipped: tuple[Skipped, ...]
    exclusive: bool
    """The user named this engine; no other may be used in its place."""

    @property
    def explanation(self) -> str:
        """Every skipped candidate with its reason, in one line."""
        return "; ".join(map(str, self.skipped)) or "there is no candidate"


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_seconds: float) -> None:
        super().__init__("localhost", timeout=timeout_seconds)
        self._path = path

    def connect(self) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(self.timeout)
        try:
            connection.connect(self._path)
        except BaseException:
            connection.close()
            raise
        self.sock = connection


def why_unusable(address: str, timeout_seconds: float = PING_TIMEOUT_SECONDS) -> str | None:
    """Ping an address.

    Returns:
        ``None`` where a Docker Engine answers, else why it cannot be used.
    """
    if not address.startswith(_UNIX):
        return "only unix:// addresses are supported: sandboxes share files and loopback with the engine's machine"
    path = address.removeprefix(_UNIX)
    if not Path(path).exists():
        return NO_SOCKET
    connection = _UnixConnection(path, timeout_seconds)
    try:
        connection.request("GET", "/_ping")
        response = connection.getresponse()
        response.read(1024)
        headers, status = response.headers, response.status
    except TimeoutError:
        return f"nobody answers within {timeout_seconds:g} s"
    except PermissionError:
        return "permission denied"
    except ConnectionRefusedError:
        return "a socket file, but nobody listens"
    except (OSError, http.client.HTTPException) as error:
        return f"no usable answer ({str(error) or type(error).__name__})"
    finally:
        connection.close()
    if headers.get("Libpod-Api-Version"):
        return "Podman answers, not Docker"
    if status != http.HTTPStatus.OK:
        return f"its ping answers {status}"
    api = headers.get("Api-Version", "")
    if not api:
        return "what answers is not a Docker Engine (no Api-Version header)"
    if _api_version(api) < MINIMUM_API:
        return f"its API is {api}, and at least {'.'.join(map(str, MINIMUM_API))} (Docker 20.10) is needed"
    return None


def _api_version(text: str) -> tuple[int, ...]:
    parts = text.split(".")
    return tuple(int(part) for part in parts) if all(part.isdigit() for part in parts) else (0,)


def _context_candidate(environment: Mapping[str, str], home: Path) -> Candidate | Skipped | None:
    folder = Path(environment.get("DOCKER_CONFIG") or home / ".docker")
    name = environment.get("DOCKER_CONTEXT", "")
    if not name:
        try:
            configuration: object = json.loads((folder / "config.json").read_text("utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            return Skipped(address="", origin=f"{folder / 'config.json'}", reason=f"cannot be read: {error}")
        name = str(configuration.get("currentContext") or "") if isinstance(configuration, dict) else ""
    if name in {"", "default"}:
        return None
    origin = f"docker context {name!r}"
    meta = folder / "contexts" / "meta" / hashlib.sha256(name.encode()).hexdigest() / "meta.json"
    try:
        document = json.loads(meta.read_text("utf-8"))
    except FileNotFoundError:
        return Skipped(address="", origin=origin, reason="there is no such context")
    except (OSError, ValueError) as error:
        return Skipped(address="", origin=origin, reason=f"its file cannot be read: {error}")
    try:
        address = document["Endpoints"]["docker"]["Host"]
    except (KeyError, TypeError):
        return Skipped(address="", origin=origin, reason="it has no docker endpoint")
    return Candidate(address=str(address), origin=origin)


def candidates(environment: Mapping[str, str], system_socket: str = _SYSTEM_SOCKET) -> list[Candidate | Skipped]:
    """Every address to try, in order; each only once."""
    explicit = environment.get("DOCKER_HOST", "")
    if explicit:
        return [Candidate(address=explicit, origin="DOCKER_HOST")]
    home = Path(environment.get("HOME") or Path.home())
    found: list[Candidate | Skipped] = []
    context = _context_candidate(environment, home)
    if context is not None:
        found.append(context)
    found.append(Candidate(address=f"{_UNIX}{system_socket}", origin="the system's socket"))
    found.append(Candidate(address=f"{_UNIX}{home}/.docker/run/docker.sock", origin="Docker Desktop's socket"))
    runtime = environment.get("XDG_RUNTIME_DIR", "")
    if runtime:
        found.append(Candidate(address=f"{_UNIX}{runtime}/docker.sock", origin="the user's socket"))
    seen: set[str] = set()
    unique: list[Candidate | Skipped] = []
    for item in found:
        if isinstance(item, Skipped) or item.address not in seen:
            unique.append(item)
            seen.add(item.address)
    return unique


def find_engine(
    environment: Mapping[str, str],
    *,
    system_socket: str = _SYSTEM_SOCKET,
    timeout_seconds: float = PING_TIMEOUT_SECONDS,
) -> FoundEngine:
    """The first candidate that answers as a Docker Engine; never starts one."""
    skipped: list[Skipped] = []
    exclusive = bool(environment.get("DOCKER_HOST"))
    for item in candidates(environment, system_socket):
        if isinstance(item, Skipped):
            skipped.append(item)
            continue
        reason = why_unusable(item.address, timeout_seconds)
        if reason is None:
            return FoundEngine(address=item.address, origin=item.origin, skipped=tuple(skipped), exclusive=exclusive)
        skipped.append(Skipped(address=item.address, origin=item.origin, reason=reason))
    return FoundEngine(address=None, origin="", skipped=tuple(skipped), exclusive=exclusive)
