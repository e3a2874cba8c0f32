"""The supervisor as a process: exit codes and the last line on standard error."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING

import pytest

from openshell.verdicts import Category, LastWords, Stage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine
    from pathlib import Path

    from unit.supervisor.fake_gateway import FakeGateway
    from unit.supervisor.launch_material import LaunchMaterial

    Spawn = Callable[[list[str], dict[str, str]], Coroutine[object, object, asyncio.subprocess.Process]]


@pytest.fixture
async def spawn() -> AsyncIterator[Spawn]:
    """Starts supervisors and leaves none behind."""
    started: list[asyncio.subprocess.Process] = []

    async def start(flags: list[str], environment: dict[str, str]) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-Im",
            "supervisor_reference",
            *flags,
            env={"PATH": os.defpath, **environment},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.fixture
def silent_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


async def ended(process: asyncio.subprocess.Process) -> tuple[int | None, list[str]]:
    output, errors = await asyncio.wait_for(process.communicate(), 30)
    assert output == b""
    return process.returncode, errors.decode().splitlines()


async def test_a_wrong_launch_input_is_the_last_line(spawn: Spawn, launch: LaunchMaterial, tmp_path: Path) -> None:
    flags = launch.stage(tmp_path)
    code, lines = await ended(await spawn([*flags, "--upstream-proxy=http://p"], launch.environment("http://h:1")))
    assert code == 64
    words = LastWords.find_in(lines[-1])
    assert words is not None
    assert words.public.startswith("--upstream-proxy is refused")


async def test_an_unusable_workspace_ends_with_78(spawn: Spawn, launch: LaunchMaterial, tmp_path: Path) -> None:
    flags = [*launch.stage(tmp_path), "--workdir", "/proc/1"]
    code, lines = await ended(await spawn(flags, launch.environment("http://h:1")))
    assert code == 78
    assert LastWords.find_in(lines[-1]) is not None


@pytest.mark.slow
async def test_an_unreachable_gateway_is_the_last_line_and_the_code(
    spawn: Spawn, launch: LaunchMaterial, tmp_path: Path, silent_port: int
) -> None:
    url = f"http://127.0.0.1:{silent_port}"
    code, lines = await ended(await spawn(launch.stage(tmp_path), launch.environment(url)))
    assert code == 69
    assert LastWords.find_in(lines[-1]) == LastWords(
        stage=Stage.BUILD,
        category=Category.INFRASTRUCTURE,
        public=f"cannot reach the gateway at {url}: connection refused",
        private=f"cannot reach the gateway at {url}: connection refused",
    )
    for line in lines:
        assert isinstance(json.loads(line), dict)
        assert launch.auth.gateway_token not in line
        assert launch.auth.sandbox_token not in line


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
async def test_a_signal_while_waiting_for_the_boundary(
    fake: FakeGateway, spawn: Spawn, launch: LaunchMaterial, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    process = await spawn(launch.stage(tmp_path), launch.environment(fake.url))
    await asyncio.wait_for(fake.called("ReportSandboxConfiguration"), 30)
    process.send_signal(number)
    got, lines = await ended(process)
    assert got == code
    words = LastWords.find_in(lines[-1])
    assert words is not None
    assert words.public == f"ended by {number.name} from outside"


async def test_a_signal_before_anything_is_imported(spawn: Spawn, launch: LaunchMaterial, tmp_path: Path) -> None:
    # The descriptor is a pipe that nobody writes: the process is certain to be between its first line and its loop.
    os.mkfifo(tmp_path / "pipe")
    flags = ["--backend-descriptor-file", str(tmp_path / "pipe"), "--auth-bundle-file", "/nowhere"]
    process = await spawn(flags, launch.environment("http://127.0.0.1:1"))
    with (tmp_path / "pipe").open("wb"):
        process.send_signal(signal.SIGTERM)
        code, lines = await ended(process)
    assert code == 143
    assert LastWords.find_in(lines[-1]) is not None
