"""The driver's socket: short enough, owner-only, never stolen."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from driver_docker.bind_socket import BindSocket, FileLock, check_path
from driver_docker.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="drv-") as name:
        yield Path(name)


@pytest.mark.parametrize("unit", ["x", "ä"])
@pytest.mark.parametrize(("length", "fits"), [(107, True), (108, False)])
def test_field_report_55_the_paths_length_is_counted_in_bytes(unit: str, length: int, *, fits: bool) -> None:
    size = len(unit.encode())
    rest = length - len("/run/")
    path = Path("/run/" + unit * (rest // size) + "x" * (rest % size))
    assert len(os.fsencode(path)) == length
    if fits:
        check_path(path)
        return
    with pytest.raises(ConfigurationError, match="108 bytes"):
        check_path(path)


def test_a_relative_path_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="absolute"):
        check_path(Path("d.sock"))


def test_a_missing_folder_is_made_for_the_owner_alone(folder: Path) -> None:
    with BindSocket(folder / "a" / "d.sock"):
        assert stat.S_IMODE((folder / "a").stat().st_mode) == 0o700
    assert list((folder / "a").iterdir()) == []


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_folder_open_to_others_is_refused_with_the_cure(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    with pytest.raises(ConfigurationError, match="chmod 700"):
        BindSocket(folder / "d.sock")


def test_a_folder_that_is_a_link_is_refused(folder: Path) -> None:
    (folder / "real").mkdir(mode=0o700)
    (folder / "link").symlink_to(folder / "real")
    with pytest.raises(ConfigurationError, match="link"):
        BindSocket(folder / "link" / "d.sock")


def test_a_second_driver_is_refused_and_leaves_the_first_its_files(folder: Path) -> None:
    path = folder / "d.sock"
    with BindSocket(path):
        path.touch()
        with pytest.raises(ConfigurationError, match="another driver is serving"):
            BindSocket(path)
        assert path.exists()
    assert list(folder.iterdir()) == []


def test_a_stale_socket_is_replaced_and_a_live_or_strange_one_is_not(folder: Path) -> None:
    path = folder / "d.sock"
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(str(path))
        old.listen()
        with pytest.raises(ConfigurationError, match="another process is listening"):
            BindSocket(path)
        assert path.exists()
    with BindSocket(path):
        assert not path.exists()
    path.write_text("a file of somebody")
    with pytest.raises(ConfigurationError, match="not a socket"):
        BindSocket(path)
    assert path.read_text() == "a file of somebody"
    assert not path.with_name("d.sock.lock").exists()


def test_a_lock_on_a_file_that_was_removed_meanwhile_is_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = folder / "lock"
    first = FileLock(file, held_by="first")
    real = fcntl.flock

    def end_of_the_first(descriptor: int, how: int) -> None:
        monkeypatch.setattr("fcntl.flock", real)
        first.release()  # after the second has opened the file
        real(descriptor, how)

    monkeypatch.setattr("fcntl.flock", end_of_the_first)
    second = FileLock(file, held_by="nobody")
    with pytest.raises(ConfigurationError, match="second"):
        FileLock(file, held_by="second")
    second.release()
    assert not file.exists()


def test_a_lock_that_a_third_took_meanwhile_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = folder / "lock"
    first = FileLock(file, held_by="first")
    real, thirds = fcntl.flock, []

    def end_of_the_first(descriptor: int, how: int) -> None:
        monkeypatch.setattr("fcntl.flock", real)
        first.release()
        thirds.append(FileLock(file, held_by="nobody"))
        real(descriptor, how)

    monkeypatch.setattr("fcntl.flock", end_of_the_first)
    with pytest.raises(ConfigurationError, match="the third"):
        FileLock(file, held_by="the third")
    assert file.exists()
    thirds[0].release()


def test_a_listener_that_takes_no_more_connections_is_not_taken_for_a_stale_socket(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("driver_docker.bind_socket._PROBE_SECONDS", 0.05)
    path = folder / "d.sock"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as waiting:
        listener.bind(str(path))
        listener.listen(0)
        waiting.connect(str(path))  # the only place in its queue
        with pytest.raises(ConfigurationError, match="cannot be told"):
            BindSocket(path)
        assert path.exists()
