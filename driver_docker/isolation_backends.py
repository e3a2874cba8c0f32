"""Isolation backends that the operator registered in the driver's own table (isolation contract 2.5). Pure.

A registration names where a backend listens and whose certificate it shows there. What this driver can place for a
supervisor is a Unix socket of this host, whose folder is bind-mounted, and TCP, which the supervisor reaches over the
host's network. A vsock port belongs to a virtual machine; it may be registered, but not selected.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import PlainValidator

from driver_docker.errors import PreconditionError
from driver_docker.upstream_proxy import SUPERVISOR_DIR
from openshell.isolation.documents import (
    BUILT_IN_BACKEND,
    BackendRegistration,
    DocumentError,
    IsolationBackends,
    Transport,
    TransportTls,
    UnixTransport,
    VsockTransport,
)
from openshell.isolation.endpoints import ENDPOINT_ERROR, MAX_SOCKET_PATH_BYTES, read_transport
from openshell.isolation.json_fields import Fields

if TYPE_CHECKING:
    from driver_docker.sandbox_record import SandboxRecord

BACKEND_SOCKET_DIR: Final = "/.openshell/isolation-backend"
"""Where the folder of a backend's Unix socket appears in the supervisor's container."""
BOUNDARY_LAUNCH_PATH: Final = f"{SUPERVISOR_DIR}/boundary-launch.json"
ISOLATION_BACKENDS_PATH: Final = f"{SUPERVISOR_DIR}/isolation-backends.json"

_TRUST_KEYS: Final = ("server_name", "trust_anchor")


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredBackend:
    """One backend of the operator's table."""

    registration: BackendRegistration
    """Its name, and where it listens as this host sees it."""
    server_name: str | None = None
    """The name in the certificate that the backend shows."""
    trust_anchor: Path | None = None
    """PEM file of the authority that signed that certificate."""

    @property
    def name(self) -> str:
        """The registered name."""
        return self.registration.name

    @property
    def socket_folder(self) -> str | None:
        """The folder of a Unix socket on this host; `None` for other endpoints."""
        endpoint = self.registration.endpoint
        return posixpath.dirname(endpoint.socket_path) if isinstance(endpoint, UnixTransport) else None

    def as_supervisor_sees_it(self) -> IsolationBackends:
        """The file of registered backends for the supervisor: this one alone, as its container reaches it."""
        endpoint: Transport = self.registration.endpoint
        if isinstance(endpoint, UnixTransport):
            endpoint = UnixTransport(socket_path=_place(endpoint))
        return IsolationBackends(backends=(BackendRegistration(name=self.name, endpoint=endpoint),))


@dataclass(frozen=True, slots=True, kw_only=True)
class Delegation:
    """What a supervisor is told about a backend that is not the built-in one."""

    backends: IsolationBackends
    """The registered backends, as its container reaches them."""
    tls: TransportTls
    """Whose certificate to trust there."""

    @property
    def name(self) -> str:
        """The admitted backend."""
        return self.backends.backends[0].name


def supervisor_arguments(backend: RegisteredBackend | None) -> tuple[str, ...]:
    """The supervisor's flags for a delegated backend (isolation contract 1)."""
    if backend is None:
        return ()
    return ("--boundary-launch-file", BOUNDARY_LAUNCH_PATH, "--isolation-backends-file", ISOLATION_BACKENDS_PATH)


def supervisor_binds(backend: RegisteredBackend | None) -> tuple[str, ...]:
    """The folder of a backend's socket, read-only: a socket that the backend makes anew stays reachable that way."""
    if backend is None or backend.socket_folder is None:
        return ()
    return (f"{backend.socket_folder}:{BACKEND_SOCKET_DIR}:ro",)


Registrations = Mapping[str, RegisteredBackend]


def parse_registrations(value: object) -> Registrations:
    """Read the table, entries that nobody uses included.

    Args:
        value: A table by name, or a list of tables each with its `name`.

    Raises:
        ValueError: With the contract's text, after the entry's name.
    """
    found: dict[str, RegisteredBackend] = {}
    for name, table in _entries(value):
        backend = _parse_one(name, table)
        if name in found:
            raise ValueError(f"{name}: duplicate isolation backend registration")
        found[name] = backend
    return found


IsolationBackendTable = Annotated[Registrations, PlainValidator(parse_registrations)]
"""The type of the configuration's table."""


def check_selectable(backends: Registrations, name: str) -> None:
    """Check that a configured selection can be placed on Docker at all.

    Raises:
        ValueError: It is not registered, or cannot be placed.
    """
    if name == BUILT_IN_BACKEND:
        return
    backend = backends.get(name)
    if backend is None:
        raise ValueError(f"backend not registered: {name}; add [isolation_backends.{name}]")
    endpoint = backend.registration.endpoint
    if isinstance(endpoint, VsockTransport):
        raise ValueError(  # noqa: TRY004 - the value of a key is wrong
            f"isolation backend {name} cannot be placed: a supervisor in a container reaches no vsock port; "
            "register a unix or tcp endpoint"
        )
    missing = [key for key in _TRUST_KEYS if not getattr(backend, key)]
    if missing:
        raise ValueError(
            f"isolation backend {name} needs {' and '.join(missing)}: the supervisor must know whose certificate "
            "to trust"
        )
    if not isinstance(endpoint, UnixTransport):
        return
    length = len(os.fsencode(_place(endpoint)))
    if length > MAX_SOCKET_PATH_BYTES:
        raise ValueError(
            f"isolation backend {name} cannot be placed: its socket would have a path of {length} bytes in the "
            f"supervisor, and {MAX_SOCKET_PATH_BYTES} is the most; give it a shorter name"
        )
    if ":" in endpoint.socket_path or backend.socket_folder in {None, "/"}:
        raise ValueError(
            f"isolation backend {name} cannot be placed: its socket must lie in a folder of its own, and its path must "
            "hold no ':'"
        )


def check_placeable(backend: RegisteredBackend, *, engine_is_local: bool) -> None:
    """Check before anything is created that a supervisor would reach the backend.

    Raises:
        PreconditionError: It listens on a Unix socket, and the engine is on another host or the socket's folder is not
            on this one.
    """
    folder = backend.socket_folder
    if folder is None:
        return
    if not engine_is_local:
        raise PreconditionError(
            f"isolation backend {backend.name} cannot be placed: the engine is not known to be on this host, so nor is "
            "the folder of its socket; register a tcp endpoint, or name the engine's socket in socket_path",
            reason="IsolationBackendNotPlaceable",
        )
    if not os.path.isdir(folder):  # noqa: PTH112 - unlike Path's, it never raises
        raise PreconditionError(
            f"isolation backend {backend.name} cannot be placed: the folder of its socket {folder} does not exist on "
            "this host, or the driver cannot see it; start the backend first",
            reason="IsolationBackendNotPlaceable",
        )


def check_pin(record: SandboxRecord, selected: str) -> None:
    """Check that a sandbox is started under the backend that it was admitted with (isolation contract 5.4).

    Raises:
        PreconditionError: Another backend is selected now.
    """
    pinned = record.isolation_backend or BUILT_IN_BACKEND
    if pinned != selected:
        raise PreconditionError(
            f"sandbox isolation backend '{pinned}' does not match gateway selection '{selected}'; restore the gateway "
            "selection or create a new sandbox",
            reason="IsolationBackendMismatch",
        )


def _place(endpoint: UnixTransport) -> str:
    """The path of a socket in the supervisor's container."""
    return posixpath.join(BACKEND_SOCKET_DIR, posixpath.basename(endpoint.socket_path))


def _entries(value: object) -> list[tuple[str, dict[str, Any]]]:
    if isinstance(value, Mapping):
        entries = [(name, table) for name, table in value.items()]
    elif isinstance(value, list) and all(isinstance(table, Mapping) for table in value):
        entries = [(table.get("name"), {key: table[key] for key in table if key != "name"}) for table in value]
    else:
        raise ValueError("must be a table of tables by name")
    for name, table in entries:
        if not isinstance(name, str):
            raise ValueError("invalid or reserved delegated backend name")  # noqa: TRY004 - pydantic takes this one
        if not isinstance(table, Mapping):
            raise ValueError(f"{name}: must be a table")  # noqa: TRY004
    return [(name, dict(table)) for name, table in entries]


def _parse_one(name: str, table: dict[str, Any]) -> RegisteredBackend:
    trust = {key: table.pop(key, None) for key in _TRUST_KEYS}
    if any(text is not None and (not isinstance(text, str) or not text.strip()) for text in trust.values()):
        raise ValueError(f"{name}: server_name and trust_anchor must be texts")
    try:
        endpoint = read_transport(Fields(table, "endpoint"))
    except DocumentError as error:
        raise ValueError(f"{name}: {ENDPOINT_ERROR} ({error.field})") from None
    try:
        registration = BackendRegistration(name=name, endpoint=endpoint)
    except DocumentError:
        raise ValueError("invalid or reserved delegated backend name") from None
    anchor = trust["trust_anchor"]
    return RegisteredBackend(
        registration=registration,
        server_name=trust["server_name"],
        trust_anchor=Path(anchor) if anchor else None,
    )
