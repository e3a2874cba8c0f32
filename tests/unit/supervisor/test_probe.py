"""The readiness probe that the engine runs."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from supervisor_reference.health import readiness_listener
from supervisor_reference.probe import probe

if TYPE_CHECKING:
    from pathlib import Path


async def test_answers_while_the_listener_lasts(tmp_path: Path) -> None:
    path = tmp_path / "health.sock"
    path.write_text("left over by an earlier run")
    async with readiness_listener(path):
        assert await asyncio.to_thread(probe, [f"--socket={path}"]) == 0
        assert path.stat().st_mode & 0o777 == 0o600
    assert not path.exists()
    assert probe(["--socket", str(path)]) == 1


async def test_a_listener_that_does_not_speak_is_not_ready(tmp_path: Path) -> None:
    path = tmp_path / "health.sock"
    server = await asyncio.start_unix_server(lambda _, writer: writer.close(), path=str(path))
    async with server:
        assert await asyncio.to_thread(probe, ["--socket", str(path)]) == 1


@pytest.mark.parametrize("arguments", [[], ["--socket"], ["/path"], ["--socket", "a", "b"]])
def test_a_wrong_command_line_is_told(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert probe(arguments) == 64
    assert "usage" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["/nowhere/health.sock", "x" * 200, "a\0b"])
def test_an_impossible_path_is_not_ready(path: str) -> None:
    assert probe(["--socket", path]) == 1


def test_the_probe_imports_nothing_heavy() -> None:
    code = (
        "import os, sys\n"
        "def leave(code):\n"
        "    print(code, *sorted(sys.modules))\n"
        "    raise SystemExit\n"
        "os._exit = leave\n"
        "from supervisor_reference import cli\n"
        "cli.main(['health', '--socket', '/nowhere'])\n"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False, timeout=60)
    status, *modules = done.stdout.split()
    assert status == "1"
    assert not {"grpc", "asyncio", "json", "logging", "argparse", "openshell"} & set(modules)
