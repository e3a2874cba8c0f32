from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import docker
import pytest

from devtools.engine_record import EngineRecord, ProcessIdentity
from devtools.engine_remains import processes_of, wait_ended
from devtools.private_engine import has_dockerd

if TYPE_CHECKING:
    from collections.abc import Iterator

OWNER = Path(__file__).with_name("private_engine_owner.py")
END_SECONDS = 60.0

pytestmark = [
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("unshare") is None or not has_dockerd(),
        reason="a private engine in a network namespace of its own needs root, unshare and dockerd",
    )
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A process that owns a private engine."""

    process: subprocess.Popen[str]
    stdin: IO[str]
    stdout: IO[str]
    facts: dict[str, Any]
    record: EngineRecord

    def end(self) -> dict[str, Any]:
        """Let it end in order."""
        self.stdin.close()
        last: dict[str, Any] = json.loads(self.stdout.readline())
        assert self.process.wait(END_SECONDS) == 0
        return last


@contextmanager
def owner(cache: Path, *options: str) -> Iterator[Owner]:
    command = ["unshare", "--net", sys.executable, str(OWNER), str(cache), *options]
    with (
        (cache.parent / "owner.log").open("a") as log,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, (cache.parent / "owner.log").read_text()
        record = EngineRecord.read(cache / "engine" / "record.json")
        assert record is not None
        yield Owner(process=process, stdin=process.stdin, stdout=process.stdout, facts=json.loads(line), record=record)


def run_container(address: str) -> int:
    """Start a container that ignores SIGTERM, on a volume, and return the number of its main process."""
    busybox = next(
        (path for path in map(shutil.which, ("busybox.static", "busybox", "sleep")) if path is not None), None
    )
    assert busybox is not None
    client = docker.APIClient(base_url=address, version="auto", timeout=60)
    try:
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w", dereference=True) as archive:
            for name in program_files(Path(busybox).resolve()):
                archive.add(name, arcname=name.lstrip("/"))
        client.import_image_from_data(content.getvalue(), repository="local/waiter", tag="1")
        config = client.create_host_config(network_mode="none", binds=["kept:/kept"])
        command = [str(Path(busybox).resolve()), *([] if busybox.endswith("sleep") else ["sleep"]), "1000"]
        created = client.create_container("local/waiter:1", command, host_config=config, volumes=["/kept"])
        client.start(created["Id"])
        pid: int = client.inspect_container(created["Id"])["State"]["Pid"]
        return pid
    finally:
        client.close()


def program_files(program: Path) -> list[str]:
    """A program with the libraries that it loads."""
    listed = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=False).stdout
    words = [word for line in listed.splitlines() for word in line.split()]
    return [str(program), *(word for word in words if word.startswith("/") and Path(word).exists())]


def assert_nothing_left(record: EngineRecord) -> None:
    assert processes_of(record) == []
    assert not Path(record.run_folder).exists()
    assert record.run_folder not in Path("/proc/self/mountinfo").read_text()
    assert record.data_folder not in Path("/proc/self/mountinfo").read_text()
    assert list(Path("/sys/fs/cgroup").rglob(record.control_group)) == []
    assert [name for name in record.made_folders if Path(name).exists()] == []


def identity(pid: int) -> ProcessIdentity:
    found = ProcessIdentity.of(pid)
    assert found is not None
    return found


def test_it_ends_with_its_owner_and_leaves_nothing(tmp_path: Path) -> None:
    with owner(tmp_path / "cache") as first:
        run_container(first.facts["address"])
        first.end()
    assert not (tmp_path / "cache" / "engine" / "record.json").exists()
    assert_nothing_left(first.record)


def test_it_ends_when_its_owner_is_killed(tmp_path: Path) -> None:
    with owner(tmp_path / "cache") as first:
        contained = identity(run_container(first.facts["address"]))
        keeper = identity(first.facts["keeper"])
        first.process.kill()
        assert wait_ended(keeper, END_SECONDS)
        assert wait_ended(contained, 0.0)
    assert_nothing_left(first.record)


def test_what_is_left_when_owner_and_keeper_are_killed_is_taken_back_by_the_next(tmp_path: Path) -> None:
    with owner(tmp_path / "cache") as first:
        contained = identity(run_container(first.facts["address"]))
        os.kill(first.facts["keeper"], 9)
        first.process.kill()
    with owner(tmp_path / "cache") as second:
        assert wait_ended(contained, 0.0)
        assert_nothing_left(first.record)
        client = docker.APIClient(base_url=second.facts["address"], version="auto", timeout=60)
        assert [container["State"] for container in client.containers(all=True)] == ["exited"]
        client.close()
        second.end()
    assert_nothing_left(second.record)


def test_a_second_owner_waits_for_the_first(tmp_path: Path) -> None:
    with owner(tmp_path / "cache") as first:
        command = ["unshare", "--net", sys.executable, str(OWNER), str(tmp_path / "cache")]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(command, text=True, **pipes) as second:  # type: ignore[call-overload]
            assert "waiting until it ends" in second.stderr.readline()
            assert second.poll() is None
            assert Path(first.facts["address"].removeprefix("unix://")).exists()
            first.end()
            facts = json.loads(second.stdout.readline())
            assert facts["dockerd"] != first.facts["dockerd"]
            second.stdin.close()
            assert second.wait(END_SECONDS) == 0


def test_another_engines_bridge_is_not_touched(tmp_path: Path) -> None:
    with owner(tmp_path / "cache", "--with-docker0") as first:
        assert {"docker0", first.record.bridge} <= set(first.facts["interfaces"])
        last = first.end()
    assert "docker0" in last["interfaces"]
    assert first.record.bridge not in last["interfaces"]


def test_without_another_engine_no_interface_is_made(tmp_path: Path) -> None:
    with owner(tmp_path / "cache") as first:
        assert first.record.bridge == ""
        assert "docker0" not in first.facts["interfaces"]
        first.end()
