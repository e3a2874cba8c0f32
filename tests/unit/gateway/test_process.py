"""The command as a process: its lines, its signals, its exit codes, its files."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner
from scripted.compute_driver import ScriptedDriver
from scripted.gateway_bench import WORKSPACE, rest

from gateway_embedded.cli import main
from openshell.wire.v1 import openshell_pb2 as pb
from openshell.wire.v1 import openshell_pb2_grpc as pb_grpc


@pytest.fixture
async def driver(tmp_path: Path) -> AsyncIterator[ScriptedDriver]:
    running = ScriptedDriver()
    await running.serve(tmp_path / "driver.sock")
    yield running
    await running.close()


class Process:
    """A running `openshell-gateway serve`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.target = ""

    async def line(self) -> str:
        """The next line on standard output."""
        assert self.process.stdout is not None
        async with asyncio.timeout(30):
            return (await self.process.stdout.readline()).decode().rstrip("\n")

    async def started(self) -> None:
        """Wait for the two lines that programs wait for."""
        first = await self.line()
        assert first.startswith("listening on http://127.0.0.1:")
        self.target = first.rpartition("/")[2]
        assert await self.line() == "ready"

    async def end(self, number: signal.Signals) -> int:
        """Send a signal and wait for the exit code."""
        self.process.send_signal(number)
        async with asyncio.timeout(30):
            return await self.process.wait()


@asynccontextmanager
async def gateway(folder: Path, *options: str) -> AsyncIterator[Process]:
    arguments = [
        *("-m", "gateway_embedded.cli", "serve", "--listen", "127.0.0.1:0", "--state-dir", str(folder / "state")),
        *("--compute-driver-socket", str(folder / "driver.sock"), "--client-config", str(folder / "clients")),
    ]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, *options, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield Process(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


@asynccontextmanager
async def user(target: str) -> AsyncIterator[pb_grpc.OpenShellAsyncStub]:
    async with grpc.aio.insecure_channel(target) as channel:
        yield pb_grpc.OpenShellStub(channel)


def request(name: str) -> pb.CreateSandboxRequest:
    return pb.CreateSandboxRequest(name=name, workspace_scope=WORKSPACE, spec=pb.SandboxSpec())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it_in_order(tmp_path: Path, driver: ScriptedDriver, number: signal.Signals) -> None:
    async with gateway(tmp_path, "--name", "demo") as running:
        await running.started()
        metadata = json.loads((tmp_path / "clients" / "gateways" / "demo" / "metadata.json").read_text())
        assert metadata["gateway_endpoint"] == f"http://{running.target}"
        assert (tmp_path / "clients" / "active_gateway").read_text().strip() == "demo"
        async with user(running.target) as stub:
            await stub.CreateSandbox(request("alpha"))
            watch = stub.WatchSandbox(
                pb.WatchSandboxRequest(sandbox="alpha", workspace_scope=WORKSPACE, follow_status=True)
            )
            await watch.read()
            assert await running.end(number) == 0
            await rest(watch)
            assert await watch.code() == grpc.StatusCode.UNAVAILABLE
        assert not (tmp_path / "clients").exists()


async def test_a_second_gateway_is_refused_and_the_first_goes_on(tmp_path: Path, driver: ScriptedDriver) -> None:
    async with gateway(tmp_path) as first:
        await first.started()
        async with gateway(tmp_path) as second:
            _, errors = await second.process.communicate()
            assert second.process.returncode == 1
            assert b"another gateway uses the state folder" in errors
        async with user(first.target) as stub:
            await stub.CreateSandbox(request("alpha"))
        assert await first.end(signal.SIGTERM) == 0


async def test_what_was_answered_survives_a_kill(tmp_path: Path, driver: ScriptedDriver) -> None:
    async with gateway(tmp_path) as first:
        await first.started()
        async with user(first.target) as stub:
            made = [(await stub.CreateSandbox(request(f"s{index}"))).sandbox for index in range(5)]
            busy = [stub.CreateSandbox(request(f"b{index}")) for index in range(20)]
            await driver.entered("CreateSandbox")
            assert await first.end(signal.SIGKILL) == -signal.SIGKILL
            await asyncio.gather(*busy, return_exceptions=True)
    assert (tmp_path / "clients" / "active_gateway").exists()
    async with gateway(tmp_path) as second:
        await second.started()
        async with user(second.target) as stub:
            listed = await stub.ListSandboxes(pb.ListSandboxesRequest(workspace_scope=WORKSPACE))
            stored = {sandbox.metadata.id for sandbox in listed.sandboxes}
            assert {sandbox.metadata.id for sandbox in made} <= stored
            # Nothing was created at the driver that the gateway does not know.
            assert {sandbox.id for sandbox in driver.created} <= stored
        assert await second.end(signal.SIGTERM) == 0
    assert not (tmp_path / "clients").exists()


async def test_a_driver_that_does_not_fit_ends_it_with_a_reason(tmp_path: Path, driver: ScriptedDriver) -> None:
    driver.capabilities.ClearField("extension")
    async with gateway(tmp_path) as running:
        assert (await running.line()).startswith("listening on")
        output, errors = await running.process.communicate()
        assert (running.process.returncode, output) == (1, b"")
        assert b"sent no extension metadata" in errors
    assert not (tmp_path / "clients").exists()


async def test_it_can_be_ended_while_it_waits_for_its_driver(tmp_path: Path) -> None:
    async with gateway(tmp_path) as running:
        assert (await running.line()).startswith("listening on")
        assert await running.end(signal.SIGTERM) == 0
        assert await running.line() == ""


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--listen", "0.0.0.0:0"], "--listen: '0.0.0.0' is not a loopback address"),
        (["--listen", "nonsense"], "--listen takes HOST:PORT, not 'nonsense'"),
        (["--listen", "127.0.0.1:99999"], "--listen takes a port from 0 (any free one) to 65535, not 99999"),
        (["--compute-driver-socket", "/" + "s" * 107], "--compute-driver-socket: the socket path has 108 bytes"),
        (["--name", "a/b"], "--name: a gateway's name has"),
        (["--compute-driver", "a b"], "--compute-driver: a driver's name has"),
        (["--required-volume-label", "team"], "--required-volume-label takes KEY=VALUE, not 'team'"),
    ],
)
def test_bad_options_are_refused_by_name(tmp_path: Path, options: list[str], text: str) -> None:
    base = ["serve", "--state-dir", str(tmp_path / "s"), "--compute-driver-socket", str(tmp_path / "d")]
    result = CliRunner().invoke(main, [*base, *options])
    assert result.exit_code == 2
    assert text in " ".join(result.output.split())
    assert "Value error" not in result.output
    assert not (tmp_path / "s").exists()


async def test_a_port_in_use_is_said_in_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with gateway(tmp_path, "--listen", f"127.0.0.1:{port}") as running:
            output, errors = await running.process.communicate()
            assert (running.process.returncode, output) == (1, b"")
    assert errors.decode().splitlines() == [
        (
            f"openshell-gateway: cannot listen on 127.0.0.1:{port}: address already in use; "
            "end what uses it, or choose another port with --listen (0 takes any free one)"
        )
    ]


async def test_its_admission_settings_are_what_the_driver_must_acknowledge(
    tmp_path: Path, driver: ScriptedDriver
) -> None:
    driver.capabilities.resource_admission_policy = (
        'v1:{"allow_driver_config":true,"resource_admission":{"enabled":false,"required_labels":{"team":"a=b"}}}'
    )
    options = ("--allow-driver-config", "--no-resource-admission", "--required-volume-label", "team=a=b")
    async with gateway(tmp_path, *options) as running:
        await running.started()
        assert await running.end(signal.SIGTERM) == 0


@pytest.mark.parametrize("arguments", [["-h"], ["serve", "-h"]])
def test_it_explains_itself(arguments: list[str]) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0
    assert "Usage:" in result.output


def test_it_names_its_version() -> None:
    result = CliRunner().invoke(main, ["--version"])
    assert result.exit_code == 0
    assert "openshell-gateway" in result.output
