"""The road from a supervisor to its gateway: a TCP relay that can be closed, as a network fault would."""

from __future__ import annotations

import contextlib
import selectors
import socket
import socketserver
import threading
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

_CHUNK_BYTES = 64 * 1024


class Road:
    """Listens on loopback and carries every connection to one destination until it is closed."""

    def __init__(self, host: str, port: int) -> None:
        """Open a road to ``host:port``."""
        self._open = set[socket.socket]()
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _handler(self, (host, port)))
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="road")
        self._thread.start()
        self._closed = False

    @property
    def endpoint(self) -> str:
        """Where the road begins."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def close(self) -> None:
        """Refuse new connections and cut those that are open."""
        if self._closed:
            return
        self._closed = True
        self._server.shutdown()
        self._server.socket.close()
        with self._lock:
            for one in self._open:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
        self._server.server_close()
        self._thread.join()

    def carry(self, near: socket.socket, destination: tuple[str, int]) -> None:
        """Copy bytes both ways until one side ends."""
        with contextlib.suppress(OSError), socket.create_connection(destination) as far:
            with self._lock:
                self._open |= {near, far}
            try:
                with selectors.DefaultSelector() as ready:
                    ready.register(near, selectors.EVENT_READ, far)
                    ready.register(far, selectors.EVENT_READ, near)
                    while True:
                        for key, _ in ready.select():
                            source, target = key.fileobj, key.data
                            data = source.recv(_CHUNK_BYTES) if isinstance(source, socket.socket) else b""
                            if not data:
                                return
                            target.sendall(data)
            finally:
                with self._lock:
                    self._open -= {near, far}

    def __enter__(self) -> Self:
        """The open road."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = False
    block_on_close = True


def _handler(road: Road, destination: tuple[str, int]) -> type[socketserver.BaseRequestHandler]:
    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            road.carry(self.request, destination)

    return Handler
