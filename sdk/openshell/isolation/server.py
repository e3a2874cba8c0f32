"""Serves a :class:`~openshell.isolation.backend.Backend` to its supervisor.

A backend author subclasses :class:`Backend`; :class:`BoundaryServer` does the rest: TLS, negotiation, OpenBoundary,
tokens, framing, digests, replay, connection states, freeze and recovery (isolation contract 2.3, 2.4, 3).
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import ssl
from pathlib import Path

import grpc.aio

from openshell.isolation.backend import Backend
from openshell.isolation.boundary_service import ControlService, PeerGate, StreamService
from openshell.isolation.boundary_session import RECOVERY_SECONDS, BoundarySession
from openshell.isolation.connection_states import BoundaryState
from openshell.isolation.documents import BUILT_IN_BACKEND, BoundaryBootstrap
from openshell.isolation.endpoints import check_socket_path
from openshell.isolation.grpc_options import server_options
from openshell.isolation.negotiation import our_metadata
from openshell.isolation.terminator import MAX_CONNECTIONS, PhysicalConnection, TlsTerminator
from openshell.isolation.tokens import TokenVerifier
from openshell.wire.isolation.backend.v1 import isolation_backend_pb2_grpc as control_grpc
from openshell.wire.sandbox.protocol.v1 import sandbox_protocol_pb2_grpc as stream_grpc

SOCKET_MODE = 0o666

_STOP_GRACE_SECONDS = 0.5


class BoundaryServer:
    """Serves one boundary.

    Args:
        backend: the backend.
        bootstrap: what the boundary was provisioned as; OpenBoundary is checked against it.
        tls: server context (``tls.server_context``).
        verifier: verifier of sandbox tokens (``tokens.TokenVerifier``).
        backend_name: the admitted name.
        implementation_version: diagnostic version in the negotiation.
        recovery_seconds: how long a frozen workload waits for its supervisor.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        bootstrap: BoundaryBootstrap,
        tls: ssl.SSLContext,
        verifier: TokenVerifier,
        backend_name: str = BUILT_IN_BACKEND,
        implementation_version: str = "0",
        recovery_seconds: float = RECOVERY_SECONDS,
    ) -> None:
        self._inner_name = f"openshell-inner-{secrets.token_hex(16)}"
        self._terminator = TlsTerminator(
            tls, inner_name=self._inner_name, on_opened=self._connection_opened, on_closed=self._connection_closed
        )
        self._session = BoundarySession(
            backend,
            bootstrap=bootstrap,
            close_connection=self._terminator.close_connection,
            recovery_seconds=recovery_seconds,
        )
        self._gate = PeerGate(self._terminator.connection_of, verifier)
        metadata = our_metadata(backend_name, implementation_version)
        self._control = ControlService(self._gate, bootstrap=bootstrap, backend_name=backend_name, metadata=metadata)
        self._streams = StreamService(self._gate, boundary_id=bootstrap.boundary_id, session=self._session)
        self._grpc: grpc.aio.Server | None = None
        self._socket: tuple[Path, int] | None = None

    @property
    def state(self) -> BoundaryState:
        """The boundary's state as it is now."""
        return self._session.state

    @property
    def recovery_expired(self) -> bool:
        """Whether the boundary ends, or has ended, because no supervisor came back in time."""
        return self._session.recovery_expired

    async def start_unix(self, socket_path: Path) -> None:
        """Listen on a Unix socket (mode 0666; its folder decides who reaches it, TLS and token who may speak).

        The socket appears under its path only once it accepts connections; a stale one is replaced.

        Raises:
            DocumentError: the path is longer than a socket's may be.
            OSError: the socket cannot be made there.
        """
        await self._start_grpc()
        try:
            listener, inode = _listen_unix(socket_path)
        except BaseException:
            await self.close()
            raise
        self._socket = (socket_path, inode)
        self._terminator.start(listener)

    async def wait_terminal(self) -> None:
        """Return once the boundary is Terminal: terminated on request, or because no supervisor came back in time."""
        await self._session.terminal.wait()

    async def terminate(self) -> None:
        """End the boundary from this side; returns once nothing runs any more."""
        await self._session.terminate()

    async def close(self) -> None:
        """Stop listening, let answers that are due leave, release everything; idempotent. Leaves the workload alone."""
        self._session.leave()
        if self._socket is not None:
            _remove_socket(*self._socket)
            self._socket = None
        await self._terminator.stop_accepting()
        if self._grpc is not None:
            await self._grpc.stop(_STOP_GRACE_SECONDS)
            self._grpc = None
        await self._terminator.close()
        await self._session.close()

    async def _start_grpc(self) -> None:
        server = grpc.aio.server(options=server_options())
        control_grpc.add_IsolationBackendServicer_to_server(self._control, server)
        stream_grpc.add_DelegatedIsolationBoundaryServicer_to_server(self._streams, server)
        server.add_insecure_port(f"unix-abstract:{self._inner_name}")
        await server.start()
        self._grpc = server

    def _connection_opened(self, connection: PhysicalConnection) -> None:
        self._gate.expect(connection)

    def _connection_closed(self, connection: PhysicalConnection) -> None:
        self._gate.forget(connection)
        self._session.disconnected(connection.id)


def _listen_unix(path: Path) -> tuple[socket.socket, int]:
    staged = path.with_name(f".{secrets.token_hex(4)}")
    for candidate in (path, staged):
        check_socket_path(str(candidate), "listener.socket_path")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(staged))
        staged.chmod(SOCKET_MODE)
        listener.listen(MAX_CONNECTIONS)
        inode = staged.lstat().st_ino
        staged.replace(path)
    except BaseException:
        listener.close()
        staged.unlink(missing_ok=True)
        raise
    return listener, inode


def _remove_socket(path: Path, inode: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        if path.lstat().st_ino == inode:
            path.unlink()


__all__ = ["SOCKET_MODE", "Backend", "BoundaryServer"]
