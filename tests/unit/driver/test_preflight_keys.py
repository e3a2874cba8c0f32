"""`check` names keys whose partner is missing, and tells how a running driver is."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import grpc
import pytest

from driver_docker.config_sources import load_config
from driver_docker.findings import Level
from driver_docker.preflight_keys import (
    judge_app_armor,
    judge_backend,
    judge_bind_mounts,
    judge_metrics_port,
    judge_running_driver,
)
from driver_docker.serving_health import ServingHealth

if TYPE_CHECKING:
    from driver_docker.config import DriverConfig


def config(**values: Any) -> DriverConfig:
    return load_config({"bind_socket": Path("/run/x/d.sock")} | values, environment={})


@pytest.mark.parametrize(
    ("values", "levels", "word"),
    [
        ({}, [], ""),
        ({"enable_bind_mounts": True}, [Level.HINT], "allow_driver_config = true and resource_admission.enabled"),
        ({"enable_bind_mounts": True, "allow_driver_config": True}, [Level.HINT], "resource_admission.enabled = false"),
        (
            {"enable_bind_mounts": True, "allow_driver_config": True, "resource_admission": {"enabled": False}},
            [Level.OK],
            "",
        ),
    ],
)
def test_bind_mounts_need_all_their_keys(values: dict[str, Any], levels: list[Level], word: str) -> None:
    findings = judge_bind_mounts(config(**values))
    assert [finding.level for finding in findings] == levels
    assert all(word in finding.cure for finding in findings)


def test_a_taken_metrics_port_is_a_fault_unless_a_driver_may_have_it(tmp_path: Path) -> None:
    assert judge_metrics_port(config()) == []
    assert judge_metrics_port(config(metrics_port=0)) == []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        wanted = config(bind_socket=tmp_path / "s", metrics_port=taken.getsockname()[1])
        (finding,) = judge_metrics_port(wanted)
        assert (finding.level, "--metrics-port" in finding.cure) == (Level.FAULT, True)
        with socket.socket(socket.AF_UNIX) as serving:
            serving.bind(str(tmp_path / "s"))
            serving.listen()
            assert [finding.level for finding in judge_metrics_port(wanted)] == [Level.HINT]
    assert [finding.level for finding in judge_metrics_port(wanted)] == [Level.OK]


@pytest.mark.parametrize(
    ("profile", "options", "levels"),
    [
        (None, (), []),
        ("Localhost/foo", (), [Level.FAULT]),
        ("Localhost/foo", ("apparmor",), [Level.HINT]),
        ("RuntimeDefault", ("apparmor",), [Level.OK]),
    ],
)
def test_a_profile_needs_an_engine_with_app_armor(
    profile: str | None, options: tuple[str, ...], levels: list[Level]
) -> None:
    host = cast("Any", SimpleNamespace(security_options=options))
    assert [finding.level for finding in judge_app_armor(config(app_armor_profile=profile), host)] == levels


def test_a_backend_must_be_there_with_its_certificate(tmp_path: Path) -> None:
    assert judge_backend(config(), is_local=True) == []
    table = {
        "kind": "unix",
        "socket_path": f"{tmp_path}/b/backend.sock",
        "server_name": "b.acme",
        "trust_anchor": f"{tmp_path}/ca.pem",
    }
    chosen = config(isolation_backend="acme", isolation_backends={"acme": table})
    (finding,) = judge_backend(chosen, is_local=True)
    assert (finding.level, f"{tmp_path}/b" in finding.found) == (Level.FAULT, True)
    (tmp_path / "b").mkdir()
    (finding,) = judge_backend(chosen, is_local=True)
    assert (finding.level, "ca.pem" in finding.found) == (Level.FAULT, True)
    (finding,) = judge_backend(chosen, is_local=False)
    assert finding.level is Level.FAULT


async def test_where_no_socket_can_be_looked_at_nobody_serves(tmp_path: Path) -> None:
    assert await judge_running_driver(tmp_path / ("x" * 300)) == []


async def test_a_running_driver_says_how_it_is(tmp_path: Path) -> None:
    socket = tmp_path / "d.sock"
    assert await judge_running_driver(socket) == []
    server, health = grpc.aio.server(), ServingHealth()
    server.add_insecure_port(f"unix:{socket}")
    health.add_to(server)
    await server.start()
    try:
        for connected, level in ((True, Level.OK), (False, Level.HINT)):
            await health.engine_events(connected)
            (finding,) = await judge_running_driver(socket)
            assert (finding.check, finding.level) == ("driver", level)
    finally:
        await server.stop(None)
