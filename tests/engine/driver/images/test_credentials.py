"""A registry that asks for a login gets the one that is meant for it, and nothing of it is ever seen."""

from __future__ import annotations

import base64
import json
import secrets
import stat
from typing import TYPE_CHECKING

import pytest
from scripted.compute_gateway import ready
from scripted.image_registry import PASSWORD, USER, workload_layer

from openshell.wire.compute.v1 import compute_driver_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from scripted.driver_bench import DriverBench
    from scripted.image_registry import ImageRegistry, RegistryRelay

WRONG = "wr0ng-Passw0rd"


@pytest.fixture
def reference(locked_registry: ImageRegistry, locked_relay: RegistryRelay) -> str:
    """An image in the locked registry."""
    name = f"w{secrets.token_hex(6)}:1"
    config = {"User": "agent", "Env": ["PATH=/bin"]}
    locked_registry.push(name, [workload_layer(secrets.token_hex(8))], config=config)
    return f"{locked_relay.address}/{name}"


async def test_without_a_login_the_failure_names_registry_and_file_and_a_login_helps_at_once(
    reference: str,
    locked_relay: RegistryRelay,
    bench: DriverBench,
    docker_config: Path,
    log_in: Callable[[str, str, str], None],
    capfd: pytest.CaptureFixture[str],
) -> None:
    async with bench.running() as (_, link):
        wanted = bench.sandbox(image=reference)
        condition = ready(await bench.launch(link, wanted))
        assert condition.reason == "ImagePullFailed"
        assert f"{docker_config} has none for {locked_relay.address}" in condition.message
        assert f"docker login {locked_relay.address}" in condition.message
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))

        log_in(locked_relay.address, USER, PASSWORD)
        again = bench.sandbox(image=reference)
        assert ready(await bench.launch(link, again)).status == "True"
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=again.id))
        seen = "".join(str(event) for _, event in link.events) + "".join(capfd.readouterr())
    for secret in (PASSWORD, base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()):
        assert secret not in seen


async def test_a_wrong_login_fails_without_being_shown(
    reference: str,
    locked_relay: RegistryRelay,
    bench: DriverBench,
    docker_config: Path,
    log_in: Callable[[str, str, str], None],
    capfd: pytest.CaptureFixture[str],
) -> None:
    log_in(locked_relay.address, USER, WRONG)
    async with bench.running() as (_, link):
        wanted = bench.sandbox(image=reference)
        condition = ready(await bench.launch(link, wanted))
        assert condition.reason == "ImagePullFailed"
        assert f"sent with the login for {locked_relay.address} from {docker_config}" in condition.message
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))
        seen = "".join(str(event) for _, event in link.events) + "".join(capfd.readouterr())
    for secret in (WRONG, base64.b64encode(f"{USER}:{WRONG}".encode()).decode()):
        assert secret not in seen


async def test_a_login_for_another_registry_is_not_sent(
    reference: str,
    locked_relay: RegistryRelay,
    bench: DriverBench,
    log_in: Callable[[str, str, str], None],
) -> None:
    host, _, port = locked_relay.address.partition(":")
    log_in(f"{host}:{int(port) ^ 1}", USER, PASSWORD)
    async with bench.running() as (_, link):
        wanted = bench.sandbox(image=reference)
        condition = ready(await bench.launch(link, wanted))
        assert condition.reason == "ImagePullFailed"
        assert "sent without a login" in condition.message
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))


def _install_helper(folder: Path, script: str) -> None:
    program = folder / "docker-credential-keep"
    program.write_text(f"#!/bin/sh\n{script}\n", "utf-8")
    program.chmod(stat.S_IRWXU)


def _write(docker_config: Path, content: dict[str, object]) -> None:
    docker_config.parent.mkdir()
    docker_config.write_text(json.dumps(content), "utf-8")


@pytest.mark.parametrize("script_fails", [False, True])
async def test_a_credential_helper_gives_the_login_or_is_named(
    reference: str,
    locked_relay: RegistryRelay,
    bench: DriverBench,
    docker_config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script_fails: bool,
) -> None:
    answer = json.dumps({"Username": USER, "Secret": PASSWORD})
    _install_helper(tmp_path, f"echo '{answer}'\nexit {int(script_fails)}")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    _write(docker_config, {"credHelpers": {locked_relay.address: "keep"}})
    async with bench.running() as (_, link):
        wanted = bench.sandbox(image=reference)
        condition = ready(await bench.launch(link, wanted))
        if script_fails:
            assert condition.reason == "ImagePullFailed"
            assert "credential helper docker-credential-keep failed" in condition.message
            assert PASSWORD not in condition.message
        else:
            assert condition.status == "True"
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))
