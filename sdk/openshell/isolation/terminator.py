"""The server's TLS terminator: TLS 1.3 outside, plaintext HTTP/2 to a local gRPC server inside.

It gives each physical connection an identity. The inner socket of a connection is bound to an unguessable abstract
name before it connects, so that the gRPC handlers see that name as their peer; a peer whose name is not the name of a
live connection did not pass TLS and is refused. A name cannot be taken over: it stays bound for as long as it is
registered, and it is never used twice.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import ssl
from collections.abc import Callable
from functools import partial

from openshell.isolation.relay import Relay
from openshell.isolation.tls import ALPN

logger = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 5.0
MAX_PENDING_HANDSHAKES = 32
MAX_CONNECTIONS = 128

_PEER_PREFIX = "unix-abstract:"
_OUT_OF_DESCRIPTORS_SECONDS = 0.1


class PhysicalConnection:
    """One TLS connection of a peer, from its handshake to its end.

    Attributes:
        id: unguessable name, unique for the life of the process.
        relay: the joined transports.
        trusted: whether its peer has shown a token; one that has not makes room for others when there are too many.
        cut: whether it was cut from this side.
    """

    def __init__(
        self, on_closed: Callable[[PhysicalConnection], None], on_released: Callable[[PhysicalConnection], None]
    ) -> None:
        self.id = f"openshell-{secrets.token_hex(16)}"
        self.trusted = False
        self.cut = False
        self.relay = Relay(on_closed=lambda: on_closed(self), on_released=lambda: on_released(self))

    @property
    def closed(self) -> asyncio.Event:
        """Set when the connection is gone."""
        return self.relay.closed

    def close(self) -> None:
        """Cut the connection at once."""
        self.cut = True
        self.relay.abort()


class TlsTerminator:
    """Accepts TLS connections and relays them to a local gRPC server.

    Args:
        context: server context.
        inner_name: abstract Unix name that the local gRPC server listens on.
        on_opened: called once for every connection that passed TLS, before a call can arrive on it.
        on_closed: called once for every connection that is gone, in the event loop, before its name is free again.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        *,
        inner_name: str,
        on_opened: Callable[[PhysicalConnection], None],
        on_closed: Callable[[PhysicalConnection], None],
    ) -> None:
        self._context = context
        self._inner_name = inner_name
        self._on_opened = on_opened
        self._on_closed = on_closed
        self._connections: dict[str, PhysicalConnection] = {}
        self._unreleased: set[PhysicalConnection] = set()
        self._handshakes: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None
        self._listener: socket.socket | None = None

    @property
    def connections(self) -> tuple[PhysicalConnection, ...]:
        """The live connections."""
        return tuple(self._connections.values())

    def connection_of(self, peer: str) -> PhysicalConnection | None:
        """The live connection behind a gRPC peer string, or none if it did not come through here."""
        if not peer.startswith(_PEER_PREFIX):
            return None
        return self._connections.get(peer.removeprefix(_PEER_PREFIX))

    def start(self, listener: socket.socket) -> None:
        """Accept on a listening socket, which belongs to the terminator from here on."""
        listener.setblocking(False)
        self._listener = listener
        self._accepting = asyncio.create_task(self._accept(listener), name="tls-terminator-accept")

    def close_connection(self, connection_id: str) -> None:
        """Cut one connection by its id, if it still lives."""
        connection = self._connections.get(connection_id)
        if connection is not None:
            connection.close()

    async def stop_accepting(self) -> None:
        """Take no more connections; those that are there stay. Idempotent."""
        tasks = [*self._handshakes, *([self._accepting] if self._accepting else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._accepting = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def close(self) -> None:
        """Stop accepting, let each connection deliver for at most two seconds, then end it; idempotent."""
        await self.stop_accepting()
        remaining = tuple(self._unreleased)
        for connection in remaining:
            connection.relay.finish()
        for connection in remaining:
            await connection.relay.released.wait()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(listener)
            except OSError as error:
                # Out of descriptors or memory: nothing announces when it is over.
                logger.warning("accepting a control connection failed: %s", error)
                await asyncio.sleep(_OUT_OF_DESCRIPTORS_SECONDS)
                continue
            if not self._make_room():
                accepted.close()
                continue
            task = asyncio.create_task(self._establish(accepted), name="tls-terminator-handshake")
            self._handshakes.add(task)
            task.add_done_callback(partial(self._handshake_ended, accepted))

    def _make_room(self) -> bool:
        """Whether one more connection fits, after cutting one where there are too many.

        Everybody who reaches the socket can take a place and say nothing, the workload included. A place is never kept
        from a newcomer, who may be the supervisor: a peer that has not shown a token yet is cut instead, any one of
        them, so that nobody can aim at a newcomer's.
        """
        pending = [task for task in self._handshakes if not task.cancelling()]
        live = [connection for connection in self._unreleased if not connection.cut]
        if len(pending) < MAX_PENDING_HANDSHAKES and len(pending) + len(live) < MAX_CONNECTIONS:
            return True
        strangers = [connection for connection in live if not connection.trusted]
        if pending and (len(pending) >= MAX_PENDING_HANDSHAKES or not strangers):
            secrets.choice(pending).cancel()
        elif strangers:
            secrets.choice(strangers).close()
        else:
            return False
        return True

    def _handshake_ended(self, accepted: socket.socket, task: asyncio.Task[None]) -> None:
        self._handshakes.discard(task)
        if task.cancelled():
            accepted.close()
        elif (error := task.exception()) is not None:
            logger.error("a control connection could not be established", exc_info=error)

    async def _establish(self, accepted: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        connection = PhysicalConnection(self._forget, self._unreleased.discard)
        try:
            # The loop closes the socket when the handshake fails.
            transport, _ = await loop.connect_accepted_socket(
                lambda: connection.relay.outer,
                accepted,
                ssl=self._context,
                ssl_handshake_timeout=HANDSHAKE_SECONDS,
                ssl_shutdown_timeout=1.0,
            )
        except OSError as error:
            logger.debug("a control connection failed its handshake: %s", type(error).__name__)
            return
        tls = transport.get_extra_info("ssl_object")
        if tls is None or tls.selected_alpn_protocol() != ALPN:
            transport.abort()
            return
        # Before the name is in use: whoever sees it must find it registered.
        self._connections[connection.id] = connection
        self._unreleased.add(connection)
        self._on_opened(connection)
        try:
            await loop.create_unix_connection(lambda: connection.relay.inner, sock=self._connect_inner(connection))
        except BaseException as error:
            connection.close()
            self._forget(connection)
            if not isinstance(error, OSError):
                raise
            logger.warning("the local gRPC server does not take a connection: %s", error)
            return
        connection.relay.join()

    def _connect_inner(self, connection: PhysicalConnection) -> socket.socket:
        inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            inner.setblocking(False)
            inner.bind(f"\0{connection.id}")
            # A Unix connect succeeds at once or, with a full backlog, fails at once.
            inner.connect(f"\0{self._inner_name}")
        except BaseException:
            inner.close()
            raise
        return inner

    def _forget(self, connection: PhysicalConnection) -> None:
        if self._connections.pop(connection.id, None) is not None:
            self._on_closed(connection)
