"""The readiness probe that the engine runs."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from supervisor_reference.health import readiness_listener
from supervisor_reference.probe import PATIENCE_SECONDS, probe

if TYPE_CHECKING:
    from pathlib import Path


async def test_answers_while_the_listener_lasts(tmp_path: Path) -> None:
    path = tmp_path / "health.sock"
    path.write_text("left over by an earlier run")
    async with readiness_listener(path):
        assert await asyncio.to_thread(probe, [f"--socket={path}"]) == 0
        assert path.stat().st_mode & 0o777 == 0o600
    assert not path.exists()
    assert probe(["--socket", str(path)], patience_seconds=0.02) == 1


async def test_waits_for_a_listener_that_is_not_there_yet(tmp_path: Path) -> None:
    # The folder is missing too, as before the supervisor has made it.
    path = tmp_path / "run" / "health.sock"
    asked = asyncio.create_task(asyncio.to_thread(probe, ["--socket", str(path)], patience_seconds=30.0))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await asyncio.shield(asked)
    async with readiness_listener(path):
        assert await asked == 0


async def test_a_listener_that_does_not_speak_is_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "health.sock"
    answers = [b"rea", b"", b"ready\n"]

    def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answers.pop(0))
        writer.close()

    async with await asyncio.start_unix_server(answer, path=str(path)):
        assert await asyncio.to_thread(probe, ["--socket", str(path)], patience_seconds=30.0) == 0
    assert answers == []


async def test_a_listener_that_never_speaks_is_not_ready(tmp_path: Path) -> None:
    path = tmp_path / "health.sock"
    async with await asyncio.start_unix_server(lambda _, writer: writer.close(), path=str(path)):
        assert await asyncio.to_thread(probe, ["--socket", str(path)], patience_seconds=0.02) == 1


def test_leaves_a_part_of_the_engines_limit_to_its_own_start() -> None:
    assert PATIENCE_SECONDS < 2.0


@pytest.mark.parametrize("arguments", [[], ["--socket"], ["/path"], ["--socket", "a", "b"]])
def test_a_wrong_command_line_is_told(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert probe(arguments) == 64
    assert "usage" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["x" * 200, "a\0b", "/dev/null/health.sock"])
def test_an_impossible_path_is_not_waited_for(path: str) -> None:
    assert probe(["--socket", path], patience_seconds=1e6) == 1


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
