"""What the preflight sees on this machine: folders, sockets, certificates, and that it changes nothing."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from driver_docker.config import DriverConfig
from driver_docker.config_sources import load_config
from driver_docker.engine_address import engine_cure
from driver_docker.findings import Level
from driver_docker.preflight import (
    judge_ca,
    judge_socket,
    judge_state_dir,
    judge_supervisor_files,
    run_preflight,
)

OPEN_ENVIRONMENT = {"DOCKER_CONFIG": "/nonexistent"}


def config(folder: Path, **values: Any) -> DriverConfig:
    defaults = {"bind_socket": folder / "s" / "d.sock", "state_dir": folder / "state"}
    return load_config(defaults | values, environment={})


def levels(found: DriverConfig, environment: dict[str, str] | None = None) -> list[Level]:
    return [finding.level for finding in judge_socket(found, environment or {})]


def test_a_free_place_is_ok_and_nothing_is_made(tmp_path: Path) -> None:
    assert levels(config(tmp_path)) == [Level.OK]
    assert judge_state_dir(config(tmp_path)).level is Level.OK
    assert list(tmp_path.iterdir()) == []


def test_field_report_55_the_length_is_counted_in_bytes(tmp_path: Path) -> None:
    fits = Path("/" + "s" * 103 + "/dd")
    assert len(str(fits)) == 107
    assert levels(config(tmp_path, bind_socket=fits)) == [Level.HINT]  # its folder would be made in the root
    assert levels(config(tmp_path, bind_socket=Path(f"{fits}d"))) == [Level.FAULT]
    assert levels(config(tmp_path, bind_socket=Path("/" + "ä" * 60 + "/d"))) == [Level.FAULT]


def test_an_open_folder_is_a_fault(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    folder.mkdir(mode=0o755)
    assert levels(config(tmp_path)) == [Level.FAULT]
    folder.chmod(0o700)
    assert levels(config(tmp_path)) == [Level.OK]
    state = tmp_path / "state" / "default"
    state.mkdir(parents=True)
    state.chmod(0o750)
    assert judge_state_dir(config(tmp_path)).level is Level.FAULT
    state.chmod(0o700)
    assert judge_state_dir(config(tmp_path)).level is Level.OK


def test_the_folder_of_another_user_is_not_to_be_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("s", "state/default"):
        (tmp_path / name).mkdir(parents=True, mode=0o700)
    owner = os.geteuid()
    monkeypatch.setattr("driver_docker.preflight.os.geteuid", lambda: owner + 1)
    (socket_folder,) = judge_socket(config(tmp_path), {})
    for finding in (socket_folder, judge_state_dir(config(tmp_path))):
        assert (finding.level, "chmod" in finding.cure) == (Level.FAULT, False)


def test_a_folder_in_the_root_looks_like_an_empty_variable(tmp_path: Path) -> None:
    (finding,) = judge_socket(config(tmp_path, bind_socket=Path("/openshell-driver/driver.sock")), {})
    assert (finding.level, "XDG_RUNTIME_DIR" in finding.found) == (Level.HINT, True)


def test_who_is_there_already_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "d.sock"))
        assert levels(config(tmp_path)) == [Level.OK]  # left from one that ended
        listener.listen()
        assert levels(config(tmp_path)) == [Level.HINT]
    (folder / "d.sock").unlink()
    (folder / "d.sock").write_text("x")
    assert levels(config(tmp_path)) == [Level.FAULT]


def test_a_listener_that_takes_no_more_connections_is_not_taken_for_a_stale_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("driver_docker.bind_socket._PROBE_SECONDS", 0.05)
    folder = tmp_path / "s"
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as waiting:
        listener.bind(str(folder / "d.sock"))
        listener.listen(0)
        waiting.connect(str(folder / "d.sock"))  # the only place in its queue
        (finding,) = judge_socket(config(tmp_path), {})
    assert (finding.level, "cannot be told" in finding.found) == (Level.FAULT, True)


def test_the_variable_that_a_gateway_reads_too_is_pointed_out(tmp_path: Path) -> None:
    found = config(tmp_path)
    shared = {"OPENSHELL_COMPUTE_DRIVER_SOCKET": str(found.bind_socket)}
    assert levels(found, shared) == [Level.HINT, Level.OK]
    assert levels(found, shared | {"OPENSHELL_DOCKER_DRIVER_BIND_SOCKET": str(found.bind_socket)}) == [Level.OK]
    assert levels(found, {"OPENSHELL_COMPUTE_DRIVER_SOCKET": "/elsewhere"}) == [Level.OK]


@pytest.mark.parametrize("content", [None, "", "no PEM"])
def test_a_ca_that_cannot_be_read_is_a_fault(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_text(content)
    assert judge_ca(file).level is Level.FAULT


def test_the_files_of_supervisors_are_looked_at_before_any_launch(tmp_path: Path) -> None:
    assert judge_supervisor_files(config(tmp_path)) == []
    auth = tmp_path / "auth"
    proxied = config(tmp_path, https_proxy="https://proxy:1", proxy_auth_file=auth)
    (missing,) = judge_supervisor_files(proxied)
    assert (missing.level, "proxy_auth_file" in missing.found) == (Level.FAULT, True)
    auth.write_text("user:s3cr3t")
    (there,) = judge_supervisor_files(proxied)
    assert there.level is Level.OK
    assert "s3cr3t" not in there.found
    (folder,) = judge_supervisor_files(config(tmp_path, provider_spiffe_workload_api_socket=f"{tmp_path}/spire/a.sock"))
    assert folder.level is Level.FAULT


async def test_field_report_16_without_an_engine_every_candidate_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("driver_docker.engine_address._FIRST_SOCKET", tmp_path / "usual.sock")
    environment = OPEN_ENVIRONMENT | {"DOCKER_HOST": f"unix://{tmp_path}/none.sock"}
    findings = await run_preflight(config(tmp_path), environment)
    engine = [finding for finding in findings if finding.check == "engine"]
    assert [finding.level for finding in engine] == [Level.FAULT, Level.FAULT]
    assert "none.sock" in engine[0].found
    assert "usual.sock" in engine[1].found
    assert all(finding.cure for finding in engine)


def test_field_report_18_a_socket_of_another_group_names_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "docker.sock"
    assert "--docker-socket" in engine_cure(f"unix://{place}")
    place.touch()
    assert "--docker-socket" in engine_cure(f"unix://{place}")
    monkeypatch.setattr("driver_docker.engine_address.os.access", lambda *_: False)
    assert f"join its group ({place.group()})" in engine_cure(f"unix://{place}")
    assert "--docker-socket" in engine_cure("tcp://127.0.0.1:1")
