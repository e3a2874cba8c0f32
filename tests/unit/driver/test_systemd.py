"""The unit file, and what the driver tells systemd."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from driver_docker.config import DriverConfig
from driver_docker.config_sources import ENVIRONMENT_PREFIX, load_config
from driver_docker.systemd_notify import notify

FOLDER = Path(__file__).parents[3] / "driver_docker" / "systemd"
UNIT = (FOLDER / "openshell-driver-docker.service").read_text("utf-8")


def values(key: str) -> list[str]:
    return [line.partition("=")[2] for line in UNIT.splitlines() if line.startswith(f"{key}=")]


def test_the_unit_waits_for_ready_and_confines_the_driver() -> None:
    assert values("Type") == ["notify"]
    assert values("CapabilityBoundingSet") == [""]
    for key in ("NoNewPrivileges", "ProtectHome", "PrivateDevices", "RestrictNamespaces", "ProtectKernelTunables"):
        assert values(key) == ["yes"], key
    assert values("ProtectSystem") == ["strict"]
    assert values("RuntimeDirectoryMode") == values("StateDirectoryMode") == ["0700"]
    # The driver's own five seconds fit into the unit's patience.
    assert int(values("TimeoutStopSec")[0]) > 5
    assert values("RestartPreventExitStatus") == ["2"]


def test_the_units_variables_are_the_drivers() -> None:
    names = [entry.partition("=")[0] for entry in values("Environment")]
    assert names
    for name in names:
        assert name.removeprefix(ENVIRONMENT_PREFIX).lower() in DriverConfig.model_fields


def test_the_shipped_configuration_is_valid() -> None:
    load_config({"bind_socket": Path("/run/x/d.sock")}, file=FOLDER / "driver.toml", environment={})


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "openshell-driver-docker.service"
    unit.write_text(UNIT.replace("/usr/bin/openshell-driver-docker", sys.executable))
    done = subprocess.run([analyze, "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False)
    told = [line for line in (done.stdout + done.stderr).splitlines() if unit.name in line]
    assert told == []


@pytest.mark.parametrize("abstract", [False, True])
def test_ready_is_told_to_the_socket_that_is_named(tmp_path: Path, abstract: bool) -> None:
    name = f"@openshell-test-{os.getpid()}" if abstract else str(tmp_path / "n.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"\0{name[1:]}" if abstract else name)
        listener.settimeout(5)
        assert notify("READY=1\nSTATUS=up", {"NOTIFY_SOCKET": name})
        assert listener.recv(256) == b"READY=1\nSTATUS=up"


@pytest.mark.parametrize("environment", [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "/none"}, {"NOTIFY_SOCKET": "x"}])
def test_nobody_there_is_no_error(environment: dict[str, str]) -> None:
    assert not notify("READY=1", environment)
