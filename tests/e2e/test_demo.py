"""The demo as a user runs it: what it tells, and that no way of ending it leaves anything behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from examples.demo.__main__ import NAMESPACE
from examples.demo.leftovers import NAMESPACE_LABEL, held_folder, remove_folders

if TYPE_CHECKING:
    from collections.abc import Iterator

    from docker import APIClient

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(slots=True)
class Demo:
    """Starts demos whose temporary folders are all in one place."""

    arguments: list[str]
    folder: Path
    engine: APIClient
    docker_host: str
    process: subprocess.Popen[str] | None = None

    def start(self, *options: str) -> subprocess.Popen[str]:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "examples.demo", *self.arguments, *options],
            cwd=ROOT,
            env=os.environ | {"TMPDIR": str(self.folder), "DOCKER_HOST": self.docker_host, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return self.process

    def until(self, text: str) -> list[str]:
        """Read the demo's output up to a line that holds a text."""
        assert self.process is not None
        assert self.process.stdout is not None
        lines: list[str] = []
        for line in self.process.stdout:
            lines.append(line)
            if text in line:
                return lines
        raise AssertionError("".join(lines))

    def ended(self) -> tuple[int, str]:
        """Wait for the end: exit code, and what was not read yet."""
        assert self.process is not None
        rest, _ = self.process.communicate(timeout=90)
        return self.process.returncode, rest

    def left(self) -> list[str]:
        """What is on the engine or in the folder."""
        wanted = {"label": f"{NAMESPACE_LABEL}={NAMESPACE}"}
        containers = [(row["Names"] or [row["Id"]])[0] for row in self.engine.containers(all=True, filters=wanted)]
        volumes = [row["Name"] for row in self.engine.volumes(filters=wanted)["Volumes"] or ()]
        return containers + volumes + [path.name for path in self.folder.iterdir()]


@pytest.fixture
def demo(
    docker_client: APIClient,
    docker_host: str,
    workload_image: str,
    runtime_image: str,
    supervisor_image: str,
) -> Iterator[Demo]:
    arguments = ["--workload-image", workload_image, "--runtime-image", runtime_image]
    arguments += ["--supervisor-image", supervisor_image]
    # Not below the tests' own folder, whose path may be long: a demo has sockets there.
    with tempfile.TemporaryDirectory(prefix="demo-") as folder:
        made = Demo(arguments, Path(folder), docker_client, docker_host)
        yield made
        if made.process is not None:
            with made.process:
                made.process.terminate()


def test_it_shows_two_verdicts_and_leaves_nothing(demo: Demo) -> None:
    demo.start("--json")
    code, output = demo.ended()
    assert code == 0, output
    facts = json.loads(output.splitlines()[-1])
    assert list(facts["left_over"].values()) == [[]] * 5
    lost, cut_off = facts["sandboxes"]
    assert (lost["phase"], lost["reason"]) == ("Error", "ControlSupervisorExited")
    assert (lost["verdict"]["exit_code"], lost["verdict"]["signal"]) == (137, "SIGKILL")
    assert lost["verdict"]["killed_by"] == "engine_client"
    assert "137" in lost["message"]
    assert "SIGKILL" in lost["message"]
    assert (cut_off["phase"], cut_off["reason"]) == ("Error", "ControlSupervisorStartFailed")
    assert "cannot reach the gateway" in cut_off["verdict"]["words"]
    assert "cannot reach the gateway" in cut_off["message"]
    assert '"StatusCode": 137' in output
    assert demo.left() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_with_everything_removed(demo: Demo, number: signal.Signals) -> None:
    process = demo.start()
    demo.until("its supervisor tries")
    process.send_signal(number)
    process.send_signal(number)
    code, output = demo.ended()
    assert code == 128 + number, output
    assert demo.left() == []


@pytest.mark.parametrize("command", ["openshell-gateway", "openshell-driver-docker"])
def test_a_command_that_dies_under_it_is_one_error_and_everything_is_removed(demo: Demo, command: str) -> None:
    process = demo.start()
    demo.until("its supervisor tries")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    victims = [int(pid) for pid in children if command in Path(f"/proc/{pid}/cmdline").read_text()]
    assert len(victims) == 1
    os.kill(victims[0], signal.SIGKILL)
    code, output = demo.ended()
    assert code == 1, output
    assert f"Error: {command} ended with code -9" in output
    assert "Traceback" not in output
    assert demo.left() == []


def test_a_second_demo_on_the_engine_is_refused_and_the_next_cleans_up_after_a_killed_one(demo: Demo) -> None:
    first = demo.start()
    demo.until("2/5")
    demo.until("ontainer")
    demo.start()
    code, output = demo.ended()
    assert code == 1
    assert "another demo is running" in output
    assert "left by a killed run" not in output
    first.kill()
    first.communicate()
    process = demo.start()
    before = "".join(demo.until("1/5"))
    assert "left by a killed run" in before
    process.terminate()
    code, output = demo.ended()
    assert code == 128 + signal.SIGTERM, output
    assert demo.left() == []


def test_only_folders_of_runs_that_have_ended_are_removed(tmp_path: Path) -> None:
    live, stale, other, link = (tmp_path / name for name in ("demo-live", "demo-stale", "other", "demo-link"))
    for folder in (live, stale, other):
        folder.mkdir()
        (folder / "file").touch()
    link.symlink_to(other)
    with held_folder(live):
        assert remove_folders(tmp_path, "demo-") == [str(stale)]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["demo-link", "demo-live", "other"]
    assert (other / "file").exists()
