"""The command line, and what of a stop is obeyed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from sandbox_runtime.errors import RuntimeExit
from sandbox_runtime.logs import Level, Log
from sandbox_runtime.serve import TRIES_A_SECOND, StopRequest
from sandbox_runtime.signals import ReceivedSignal

if TYPE_CHECKING:
    from pathlib import Path


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "sandbox_runtime", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


@pytest.mark.parametrize(
    "arguments", [(), ("--bootstrap",), ("--bootstrap", ""), ("--bootstrap=",), ("--bootstrap", "a", "b"), ("serve",)]
)
def test_a_command_line_that_is_not_understood_says_how_it_goes(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.returncode == RuntimeExit.USAGE
    assert "openshell-sandbox --bootstrap PATH" in json.loads(done.stderr)["event"]


def test_help_is_no_error() -> None:
    done = run("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "--bootstrap PATH" in done.stdout


@pytest.mark.parametrize("form", [("--bootstrap", "{}"), ("--bootstrap={}",)])
def test_outside_a_hardened_container_it_refuses_and_touches_nothing(form: tuple[str, ...], tmp_path: Path) -> None:
    bootstrap = tmp_path / "bootstrap.json"
    bootstrap.write_text("{}")
    done = run(*(word.format(bootstrap) for word in form))
    assert done.returncode == RuntimeExit.PRIVILEGE
    (line,) = done.stderr.splitlines()
    assert json.loads(line)["reason"] == "PrivilegeFloorViolated"
    assert bootstrap.exists()


async def test_only_a_stop_from_outside_is_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    stop = StopRequest(Log(Level.WARNING))
    stop.receive(ReceivedSignal(number=signal.SIGTERM, sender_pid=42))
    before = stop.asked
    assert json.loads(capsys.readouterr().err)["sender_pid"] == 42
    stop.receive(ReceivedSignal(number=signal.SIGTERM, sender_pid=0))
    assert (before, stop.asked) == (False, True)
    await stop.wait()


def test_a_process_that_tries_all_the_time_is_told_once_a_second_and_ended(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now, ended = 0.0, list[int]()
    stop = StopRequest(Log(Level.WARNING), clock=lambda: now, end=ended.append)
    attempt = ReceivedSignal(number=signal.SIGTERM, sender_pid=42)
    for _ in range(TRIES_A_SECOND - 1):
        stop.receive(attempt)
    assert ended == []
    now = 1.0
    for _ in range(TRIES_A_SECOND - 1):
        stop.receive(attempt)
    assert ended == [], "tries of different seconds are not added up"
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2
    stop.receive(attempt)
    stop.receive(ReceivedSignal(number=signal.SIGINT, sender_pid=43))
    assert ended == [42, 43]
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2, "that it is ended, and the first of the other signal"
    assert not stop.asked


def test_the_second_stop_ends_at_once() -> None:
    script = (
        "import signal\n"
        "from sandbox_runtime.logs import Level, Log\n"
        "from sandbox_runtime.serve import StopRequest\n"
        "from sandbox_runtime.signals import ReceivedSignal\n"
        "stop = StopRequest(Log(Level.ERROR)); again = ReceivedSignal(number=signal.SIGINT, sender_pid=0)\n"
        "stop.receive(again); stop.receive(again)"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=30, check=False).returncode == 128 + signal.SIGINT
