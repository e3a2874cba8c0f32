"""The connection to the engine: of no concern to it what the docker config holds, and used again for what follows."""

from __future__ import annotations

import http.server
import socketserver
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import docker.errors
import pytest
import requests

from driver_docker.engine_session import EngineSession

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"auths": {"x": {"auth": "not base64"}}}',
        '{"auths": {"x": 5}}',
        '{"proxies": {"default": {"httpProxy": "http://proxy:1"}}, "HttpHeaders": {"X-Mark": "1"}}',
    ],
)
def test_a_docker_config_neither_breaks_nor_changes_the_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    (tmp_path / "config.json").write_text(content, "utf-8")
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:1")
    with EngineSession("unix:///run/engine.sock", tls=None, timeout_seconds=5.0, max_connections=2) as session:
        assert session.base_url == "http+docker://localhost"
        assert "X-Mark" not in session.headers
        assert not session.proxies
        assert not session.trust_env
        assert list(session.adapters) == ["http+docker://"]


def test_tcp_is_plain_without_tls_files() -> None:
    with EngineSession("tcp://engine.example:2375", tls=None, timeout_seconds=5.0, max_connections=2) as session:
        assert session.base_url == "http://engine.example:2375"


@pytest.mark.parametrize("address", ["gopher://x", "tcp://x:port", "tcp://"])
def test_an_address_that_cannot_be_used_is_an_error_of_the_library(address: str) -> None:
    with pytest.raises(docker.errors.DockerException):
        EngineSession(address, tls=None, timeout_seconds=5.0, max_connections=2)


def _descriptors() -> set[str]:
    """Open descriptors, save the one that lists them."""
    return {entry.name for entry in Path("/proc/self/fd").iterdir() if entry.exists()}


def test_a_socket_that_does_not_connect_is_closed(tmp_path: Path) -> None:
    before = _descriptors()
    with EngineSession(f"unix://{tmp_path}/absent", tls=None, timeout_seconds=5.0, max_connections=2) as session:
        with pytest.raises(requests.exceptions.ConnectionError) as failed:
            session.get(f"{session.base_url}/version")
        # The error still holds the frames, and these their sockets.
        assert failed.value is not None
        assert _descriptors() <= before


class _Answering(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        _connections(self.server).append(self.connection)

    def address_string(self) -> str:
        return "local"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base's name
        del format, args

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def do_POST(self) -> None:
        self.send_response(204)
        self.end_headers()


def _connections(server: object) -> list[object]:
    found = getattr(server, "connections", None)
    assert isinstance(found, list)
    return found


@contextmanager
def _engine(socket: Path) -> Iterator[socketserver.UnixStreamServer]:
    """An HTTP server that notes its connections, on a Unix socket."""
    with socketserver.ThreadingUnixStreamServer(str(socket), _Answering) as server:
        server.daemon_threads = True
        server.__dict__["connections"] = []
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
    socket.unlink()


def test_requests_to_different_paths_share_a_connection(tmp_path: Path) -> None:
    with (
        _engine(tmp_path / "s") as server,
        EngineSession(f"unix://{tmp_path}/s", tls=None, timeout_seconds=5.0, max_connections=2) as session,
    ):
        for path in ("/_ping", "/containers/a/json", "/containers/b/json", "/images/c/json"):
            assert session.get(f"{session.base_url}{path}").json() == {}
            assert session.post(f"{session.base_url}{path}/start").status_code == 204
        assert len(_connections(server)) == 1


def test_an_engine_that_came_back_meanwhile_is_connected_to_anew(tmp_path: Path) -> None:
    with EngineSession(f"unix://{tmp_path}/s", tls=None, timeout_seconds=5.0, max_connections=2) as session:
        for _ in range(2):
            with _engine(tmp_path / "s") as server:
                assert session.get(f"{session.base_url}/_ping").status_code == 200
                for connection in _connections(server):
                    connection.shutdown(2)  # type: ignore[attr-defined]
