from __future__ import annotations

import hashlib
import json
import socket
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from devtools.engine_discovery import NO_SOCKET, find_engine, why_unusable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DOCKER = "HTTP/1.1 200 OK\r\nApi-Version: 1.41\r\nContent-Length: 2\r\n\r\nOK"
PODMAN = "HTTP/1.1 200 OK\r\nApi-Version: 1.41\r\nLibpod-Api-Version: 4.3.1\r\nContent-Length: 2\r\n\r\nOK"
OLD_DOCKER = "HTTP/1.1 200 OK\r\nApi-Version: 1.40\r\nContent-Length: 2\r\n\r\nOK"
FAILING = "HTTP/1.1 500 Internal Server Error\r\nApi-Version: 1.41\r\nContent-Length: 0\r\n\r\n"
OTHER_SERVICE = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nOK"
NOT_HTTP = "220 mail ready\r\n"


@contextmanager
def answering(path: Path, answer: str) -> Iterator[None]:
    """A socket whose service gives one answer to everything."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            while True:
                connection, _ = listener.accept()
                with connection:
                    if not connection.recv(4096):
                        return
                    connection.sendall(answer.encode())

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            with socket.socket(socket.AF_UNIX) as last:
                last.connect(str(path))
                last.shutdown(socket.SHUT_WR)
                thread.join()


@contextmanager
def silent(path: Path) -> Iterator[None]:
    """A socket that takes connections and never answers."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        yield


def dead(path: Path) -> None:
    """A socket file whose listener is gone."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (DOCKER, None),
        (PODMAN, "Podman answers, not Docker"),
        (OLD_DOCKER, "its API is 1.40, and at least 1.41 (Docker 20.10) is needed"),
        (FAILING, "its ping answers 500"),
        (OTHER_SERVICE, "what answers is not a Docker Engine (no Api-Version header)"),
    ],
)
@pytest.mark.usefixtures("no_leaks")
def test_only_dockers_own_answer_makes_a_socket_an_engine(tmp_path: Path, answer: str, reason: str | None) -> None:
    path = tmp_path / "d.sock"
    with answering(path, answer):
        assert why_unusable(f"unix://{path}") == reason


def test_an_answer_that_is_not_http_is_no_engine(tmp_path: Path) -> None:
    path = tmp_path / "d.sock"
    with answering(path, NOT_HTTP):
        assert (why_unusable(f"unix://{path}") or "").startswith("no usable answer")


def test_a_socket_file_without_listener_is_not_alive(tmp_path: Path) -> None:
    dead(tmp_path / "d.sock")
    assert why_unusable(f"unix://{tmp_path}/d.sock") == "a socket file, but nobody listens"


def test_a_listener_that_never_answers_is_given_up(tmp_path: Path) -> None:
    with silent(tmp_path / "d.sock"):
        assert why_unusable(f"unix://{tmp_path}/d.sock", timeout_seconds=0.05) == "nobody answers within 0.05 s"


def test_an_address_that_is_not_a_socket_is_refused() -> None:
    assert (why_unusable("tcp://127.0.0.1:2375") or "").startswith("only unix:// addresses are supported")


def context(configuration: Path, name: str, address: str) -> None:
    folder = configuration / "contexts" / "meta" / hashlib.sha256(name.encode()).hexdigest()
    folder.mkdir(parents=True)
    (folder / "meta.json").write_text(json.dumps({"Name": name, "Endpoints": {"docker": {"Host": address}}}))


def test_every_candidate_before_the_first_engine_is_named_with_its_reason(tmp_path: Path) -> None:
    home, runtime = tmp_path / "home", tmp_path / "run"
    runtime.mkdir()
    (home / ".docker" / "run").mkdir(parents=True)
    (home / ".docker" / "config.json").write_text(json.dumps({"currentContext": "colima"}))
    context(home / ".docker", "colima", f"unix://{tmp_path}/gone.sock")
    dead(tmp_path / "system.sock")
    environment = {"HOME": str(home), "XDG_RUNTIME_DIR": str(runtime)}
    with answering(home / ".docker/run/docker.sock", PODMAN), answering(runtime / "docker.sock", DOCKER):
        found = find_engine(environment, system_socket=str(tmp_path / "system.sock"))
    assert found.address == f"unix://{runtime}/docker.sock"
    assert [(skipped.origin, skipped.reason) for skipped in found.skipped] == [
        ("docker context 'colima'", NO_SOCKET),
        ("the system's socket", "a socket file, but nobody listens"),
        ("Docker Desktop's socket", "Podman answers, not Docker"),
    ]


def test_the_active_context_is_used_before_the_systems_socket(tmp_path: Path) -> None:
    configuration = tmp_path / "configuration"
    configuration.mkdir()
    (configuration / "config.json").write_text(json.dumps({"currentContext": "mine"}))
    context(configuration, "mine", f"unix://{tmp_path}/mine.sock")
    context(configuration, "other", f"unix://{tmp_path}/other.sock")
    environment = {"HOME": str(tmp_path), "DOCKER_CONFIG": str(configuration)}
    system = str(tmp_path / "system.sock")
    with (
        answering(tmp_path / "mine.sock", DOCKER),
        answering(tmp_path / "other.sock", DOCKER),
        answering(tmp_path / "system.sock", DOCKER),
    ):
        assert find_engine(environment, system_socket=system).address == f"unix://{tmp_path}/mine.sock"
        named = environment | {"DOCKER_CONTEXT": "other"}
        assert find_engine(named, system_socket=system).address == f"unix://{tmp_path}/other.sock"
        default = environment | {"DOCKER_CONTEXT": "default"}
        assert find_engine(default, system_socket=system).address == f"unix://{system}"


@pytest.mark.parametrize(
    ("configuration", "reason"),
    [
        ("{not json", "cannot be read"),
        (json.dumps({"currentContext": "absent"}), "there is no such context"),
    ],
)
def test_a_broken_client_configuration_is_named_and_passed_over(
    tmp_path: Path, configuration: str, reason: str
) -> None:
    (tmp_path / ".docker").mkdir()
    (tmp_path / ".docker" / "config.json").write_text(configuration)
    with answering(tmp_path / "system.sock", DOCKER):
        found = find_engine({"HOME": str(tmp_path)}, system_socket=str(tmp_path / "system.sock"))
    assert found.address == f"unix://{tmp_path}/system.sock"
    assert reason in found.skipped[0].reason


def test_a_context_of_another_kind_has_no_docker_endpoint(tmp_path: Path) -> None:
    folder = tmp_path / ".docker" / "contexts" / "meta" / hashlib.sha256(b"cluster").hexdigest()
    folder.mkdir(parents=True)
    (folder / "meta.json").write_text(json.dumps({"Name": "cluster", "Endpoints": {"kubernetes": {}}}))
    found = find_engine({"HOME": str(tmp_path), "DOCKER_CONTEXT": "cluster"}, system_socket=str(tmp_path / "none.sock"))
    assert found.address is None
    assert "docker context 'cluster'): it has no docker endpoint" in found.explanation


def test_nothing_takes_the_place_of_an_engine_that_the_user_named(tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path), "DOCKER_HOST": f"unix://{tmp_path}/named.sock"}
    with answering(tmp_path / "system.sock", DOCKER):
        found = find_engine(environment, system_socket=str(tmp_path / "system.sock"))
    assert found.address is None
    assert found.exclusive
    assert found.explanation == f"unix://{tmp_path}/named.sock (DOCKER_HOST): {NO_SOCKET}"


def test_ambient_tls_variables_do_not_matter_to_a_socket(tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path), "DOCKER_TLS_VERIFY": "1", "DOCKER_CERT_PATH": str(tmp_path)}
    with answering(tmp_path / "system.sock", DOCKER):
        found = find_engine(environment, system_socket=str(tmp_path / "system.sock"))
    assert found.address == f"unix://{tmp_path}/system.sock"
