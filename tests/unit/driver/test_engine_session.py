"""What the docker config holds is of no concern to the connection to the engine."""

from __future__ import annotations

from pathlib import Path

import docker.errors
import pytest
import requests

from driver_docker.engine_session import EngineSession


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
