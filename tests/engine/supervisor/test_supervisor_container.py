"""The supervisor in its container: placed as a driver places it, without a boundary and without a gateway."""

from __future__ import annotations

import io
import socket
import tarfile
from typing import TYPE_CHECKING

import pytest
from unit.supervisor.launch_material import LaunchMaterial, make_launch

from openshell.verdicts import Category, LastWords, Stage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from docker import APIClient
    from scripted.ownership import OwnerLabel


@pytest.fixture
def launch() -> LaunchMaterial:
    return make_launch("/.openshell/channel/sandbox/control.sock")


@pytest.fixture
def silent_url() -> str:
    """A gateway's address at which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return f"http://127.0.0.1:{port}"


def archive(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode, entry.gid = len(content), 0o440, 65534
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def created(client: APIClient, image: str, label: OwnerLabel, launch: LaunchMaterial, url: str) -> str:
    container = client.create_container(
        image,
        command=[
            "--backend-descriptor-file=/.openshell/supervisor/runtime-descriptor.json",
            "--auth-bundle-file=/.openshell/supervisor/auth.json",
            "--workdir=/sandbox",
            "--health-socket-path=/run/openshell/health.sock",
        ],
        environment=launch.environment(url),
        labels=dict(label.labels),
        volumes=["/.openshell/supervisor"],
        host_config=client.create_host_config(
            network_mode="host",
            cap_drop=["ALL"],
            security_opt=["no-new-privileges:true"],
            read_only=True,
            tmpfs={"/run": "rw,noexec,nosuid,uid=65534,mode=0700", "/tmp": "rw,noexec,nosuid,mode=1777"},
        ),
    )
    identity: str = container["Id"]
    files = {"runtime-descriptor.json": launch.descriptor.to_json(), "auth.json": launch.auth.to_json()}
    assert client.put_archive(identity, "/.openshell/supervisor", archive(files))
    return identity


def last_words(client: APIClient, container: str) -> LastWords | None:
    return LastWords.find_in(client.logs(container, stdout=False, stderr=True, tail=1).decode())


@pytest.mark.slow
def test_says_that_it_cannot_reach_its_gateway(
    docker_client: APIClient, supervisor_image: str, owner_label: OwnerLabel, launch: LaunchMaterial, silent_url: str
) -> None:
    container = created(docker_client, supervisor_image, owner_label, launch, silent_url)
    docker_client.start(container)
    assert docker_client.wait(container)["StatusCode"] == 69
    words = last_words(docker_client, container)
    assert words is not None
    assert (words.stage, words.category) == (Stage.BUILD, Category.INFRASTRUCTURE)
    assert words.public == f"cannot reach the gateway at {silent_url}: connection refused"


def test_pid_1_obeys_sigterm(
    docker_client: APIClient, supervisor_image: str, owner_label: OwnerLabel, launch: LaunchMaterial, silent_url: str
) -> None:
    container = created(docker_client, supervisor_image, owner_label, launch, silent_url)
    docker_client.start(container)
    lines = docker_client.logs(container, stream=True, follow=True)
    assert b"does not answer yet" in next(lines)
    docker_client.kill(container, "SIGTERM")
    assert b"SIGTERM received" in b"".join(lines)
    assert docker_client.wait(container)["StatusCode"] == 143
    words = last_words(docker_client, container)
    assert words is not None
    assert words.public == "ended by SIGTERM from outside"


def test_health_is_refused_while_there_is_no_session(
    docker_client: APIClient, supervisor_image: str, owner_label: OwnerLabel, launch: LaunchMaterial, silent_url: str
) -> None:
    container = created(docker_client, supervisor_image, owner_label, launch, silent_url)
    docker_client.start(container)
    check = docker_client.exec_create(
        container, ["/openshell-supervisor", "health", "--socket", "/run/openshell/health.sock"]
    )
    docker_client.exec_start(check["Id"])
    assert docker_client.exec_inspect(check["Id"])["ExitCode"] == 1
    assert docker_client.inspect_container(container)["Config"]["User"] == "65534:65534"
