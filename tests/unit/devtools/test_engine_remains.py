from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from devtools import control_groups
from devtools.engine_record import EngineRecord, ProcessIdentity, boot_id
from devtools.engine_remains import end, processes_of, reclaim, wait_ended

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def record(tmp_path: Path) -> EngineRecord:
    (tmp_path / "run").mkdir()
    return EngineRecord(
        boot_id=boot_id(),
        data_folder=str(tmp_path / "data"),
        run_folder=str(tmp_path / "run"),
        control_group=f"openshell-docker-test-{os.getpid()}",
    )


@contextmanager
def process(*arguments: str, name: str = "dockerd", ignores_term: bool = False) -> Iterator[ProcessIdentity]:
    """A process that waits, under another program's name and with its arguments."""
    script = "import signal, sys\n"
    if ignores_term:
        script += "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    script += "print('up', flush=True)\nsys.stdin.read()\n"
    child = subprocess.Popen(
        [name, "-c", script, *arguments], executable=sys.executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        identity = ProcessIdentity.of(child.pid)
        assert identity is not None
        try:
            yield identity
        finally:
            child.kill()


def is_alive(identity: ProcessIdentity) -> bool:
    return ProcessIdentity.of(identity.pid) == identity


def test_a_record_is_read_as_it_was_written(tmp_path: Path, record: EngineRecord) -> None:
    full = replace(record, bridge="osd-1", made_folders=("/a", "/a/b"), dockerd=ProcessIdentity(pid=2, start_ticks=3))
    full.write(tmp_path / "record.json")
    assert EngineRecord.read(tmp_path / "record.json") == full


@pytest.mark.parametrize("text", ["", "{", "[]", '{"boot_id": "x"}'])
def test_a_record_that_is_not_whole_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "record.json").write_text(text)
    assert EngineRecord.read(tmp_path / "record.json") is None
    assert reclaim(tmp_path / "record.json") == []
    assert not (tmp_path / "record.json").exists()


def test_what_a_killed_run_left_is_ended_and_removed(tmp_path: Path, record: EngineRecord) -> None:
    made = tmp_path / "made"
    made.mkdir()
    (tmp_path / "run" / "docker.sock").touch()
    with (
        process(f"--data-root={record.data_folder}") as dockerd,
        process("-address", f"{record.run_folder}/exec/containerd.sock", name="containerd-shim-runc-v2") as shim,
    ):
        replace(record, dockerd=dockerd, made_folders=(str(made),)).write(tmp_path / "record.json")
        assert reclaim(tmp_path / "record.json") == [f"dockerd {dockerd.pid}", "1 of its processes"]
        assert not is_alive(dockerd)
        assert not is_alive(shim)
    assert not (tmp_path / "run").exists()
    assert not made.exists()
    assert not (tmp_path / "record.json").exists()


@pytest.mark.parametrize("change", ["start time", "command line", "boot"])
def test_a_process_that_only_has_the_number_is_left_alone(tmp_path: Path, record: EngineRecord, change: str) -> None:
    data = "/another/engine" if change == "command line" else record.data_folder
    with process(f"--data-root={data}") as other:
        identity = replace(other, start_ticks=other.start_ticks - 1) if change == "start time" else other
        old = replace(record, dockerd=identity, boot_id="another" if change == "boot" else record.boot_id)
        old.write(tmp_path / "record.json")
        assert reclaim(tmp_path / "record.json") == []
        assert is_alive(other)
    assert not (tmp_path / "run").exists()


def test_a_client_that_names_the_engines_socket_is_not_the_engines(record: EngineRecord) -> None:
    with process(f"--host={record.run_folder}/docker.sock", name="docker") as client:
        assert client not in processes_of(record)


def test_a_process_that_ignores_the_request_is_killed() -> None:
    with process(ignores_term=True) as stubborn:
        end(stubborn, grace_seconds=0.05)
        assert not is_alive(stubborn)


def test_waiting_for_a_process_that_has_ended_returns_at_once() -> None:
    with process() as identity:
        assert not wait_ended(identity, 0.0)
        os.kill(identity.pid, signal.SIGKILL)
        assert wait_ended(identity, 10.0)
    assert wait_ended(identity, 0.0)


def test_mount_points_of_both_versions_are_found() -> None:
    mountinfo = (
        "22 1 0:20 / /sys rw - sysfs sysfs rw\n"
        "30 22 0:26 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
        "31 22 0:27 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    )
    assert control_groups.mount_points(mountinfo) == ["/sys/fs/cgroup/memory", "/sys/fs/cgroup/unified"]


def test_only_enabled_controllers_count() -> None:
    table = "#subsys_name\thierarchy\tnum_cgroups\tenabled\ncpu\t0\t1\t1\nmemory\t0\t1\t0\npids\t4\t2\t1\n"
    assert control_groups.v1_controllers(table) == ["cpu", "pids"]
