"""Records: owner-only, whole or not at all, readable by the next driver."""

from __future__ import annotations

import errno
import json
import stat
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from driver_docker.errors import RecordError
from driver_docker.records import MAX_EXITS, RECORD_FILE, RecordStore, StoredRecords
from driver_docker.sandbox_record import Failure, RecordPhase, SandboxRecord, encode

if TYPE_CHECKING:
    from collections.abc import Callable

AT = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
RECORD = SandboxRecord(
    sandbox_id="sb-1",
    name="one",
    workspace="default",
    phase=RecordPhase.ACTIVE,
    changed_at=AT,
    generation="g-1",
    workload_id="w",
    supervisor_id="s",
    was_ready=True,
    failure=Failure(reason="ControlSupervisorExited", message="gone", at=AT, verdict={"openshell.verdict.kind": "x"}),
)


@pytest.fixture
def store(tmp_path: Path) -> RecordStore:
    made = RecordStore(tmp_path / "state" / "default")
    made.open()
    return made


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_record_comes_back_as_it_was(store: RecordStore) -> None:
    store.save(RECORD)
    store.save(replace(RECORD, sandbox_id="sb-2", failure=None, phase=RecordPhase.FAILED))
    assert RecordStore(store.directory).load() == StoredRecords(
        records=(RECORD, replace(RECORD, sandbox_id="sb-2", failure=None, phase=RecordPhase.FAILED)),
        unreadable=(),
        without=(),
    )


def test_everything_is_for_its_owner_alone(store: RecordStore) -> None:
    store.save(RECORD)
    store.save_files("sb-1", {"supervisor-auth.json": b"secret"})
    assert _mode(store.directory) == 0o700
    assert _mode(store.directory / "sb-1") == 0o700
    assert {_mode(file) for file in (store.directory / "sb-1").iterdir()} == {0o600}
    assert store.read_file("sb-1", "supervisor-auth.json") == b"secret"
    assert store.read_file("sb-1", "none") is None


def test_a_write_that_fails_leaves_the_former_record(store: RecordStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.save(RECORD)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(RecordError, match="No space left"):
        store.save(replace(RECORD, name="two"))
    monkeypatch.undo()
    assert store.load().records == (RECORD,)
    assert [file.name for file in (store.directory / "sb-1").iterdir()] == [RECORD_FILE]


def test_the_name_of_the_driver_is_stable_until_nothing_is_left(store: RecordStore) -> None:
    name = RecordStore(store.directory).open()
    assert name == RecordStore(store.directory).open()
    store.save(RECORD)
    store.forget()
    assert store.directory.exists(), "a sandbox is left"
    assert store.remove("sb-1")
    assert not store.remove("sb-1")
    store.forget()
    assert not store.directory.exists()
    assert not store.directory.parent.exists()


def _with(**members: object) -> bytes:
    return json.dumps(json.loads(encode(replace(RECORD, sandbox_id="sb-2"))) | members).encode()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "Expecting value"),
        (b"{", "Expecting property name"),
        (b"\xff", "decode"),
        (b"[]", "no JSON object"),
        (b"null", "no JSON object"),
        (b"[" * 100_000, "no JSON object"),
        (b'{"version": 2}', "of version 2"),
        (b'{"version": 1, "failure": null}', "missing"),
        (_with(sandbox_id="sb-1"), "of sandbox 'sb-1'"),
        (_with(phase="hibernating"), "hibernating"),
        (_with(name=1), "name is no str"),
        (_with(was_ready="yes"), "was_ready is no bool"),
        (_with(supervisor_epoch="2"), "supervisor_epoch is no int"),
        (_with(changed_at=None), "damaged"),
        (_with(failure=[]), "damaged"),
        (_with(failure={"reason": "R"}), "missing"),
    ],
)
def test_a_record_that_cannot_be_read_is_told_from_one_that_is_not_there(
    store: RecordStore, content: bytes, why: str
) -> None:
    store.save(RECORD)
    store.save_files("sb-2", {RECORD_FILE: content})
    store.save_files("sb-3", {"supervisor-auth.json": b""})
    stored = store.load()
    assert (stored.records, stored.without) == ((RECORD,), ("sb-3",))
    (unreadable,) = stored.unreadable
    assert unreadable.sandbox_id == "sb-2"
    assert str(store.directory / "sb-2" / RECORD_FILE) in unreadable.why
    assert why in unreadable.why
    assert stored.known == {"sb-1", "sb-2"}


def test_a_record_that_the_disk_does_not_give_is_not_absent(
    store: RecordStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(RECORD)

    def fail(_: Path) -> bytes:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("driver_docker.records.read_regular", fail)
    stored = store.load()
    assert (stored.records, stored.without) == ((), ())
    assert "Too many open files" in stored.unreadable[0].why


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff"])
def test_a_name_of_the_driver_that_cannot_be_read_is_not_replaced(store: RecordStore, content: bytes) -> None:
    (store.directory / ".driver-owner").write_bytes(content)
    for look in (store.driver_name, RecordStore(store.directory).open):
        with pytest.raises(RecordError, match=r"\.driver-owner"):
            look()
    assert (store.directory / ".driver-owner").read_bytes() == content


def test_a_name_of_the_driver_that_is_gone_is_not_made_up_beside_sandboxes(store: RecordStore) -> None:
    store.save(RECORD)
    (store.directory / ".driver-owner").unlink()
    with pytest.raises(RecordError, match="holds sandboxes, but no"):
        RecordStore(store.directory).open()
    store.remove("sb-1")
    assert RecordStore(store.directory).open()


def test_a_state_folder_that_cannot_be_read_is_told(store: RecordStore, monkeypatch: pytest.MonkeyPatch) -> None:
    (store.directory / ".driver-owner").unlink()

    def fail(_: Path) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr("os.scandir", fail)
        for look in (store.load, store.sweep, store.open):
            with pytest.raises(RecordError, match="cannot be read: Input/output error"):
                look()
        store.forget()
    assert store.directory.exists()


def test_a_name_of_the_driver_that_the_disk_does_not_give_is_told_without_numbers(store: RecordStore) -> None:
    (store.directory / ".driver-owner").unlink()
    (store.directory / ".driver-owner").mkdir()
    with pytest.raises(RecordError) as told:
        store.driver_name()
    assert told.value.message == f"{store.directory}/.driver-owner cannot be read: Is a directory"


def test_the_last_verdicts_are_kept(store: RecordStore) -> None:
    for number in range(MAX_EXITS + 3):
        store.add_exit("sb-1", verdict={"n": str(number)}, message="m", tail="t", at=AT)
    exits = store.exits("sb-1")
    assert [entry["verdict"]["n"] for entry in exits] == [str(n) for n in range(3, MAX_EXITS + 3)]
    assert exits[-1]["tail"] == "t"
    assert store.exits("sb-2") == []


def test_verdicts_that_cannot_be_read_now_are_not_replaced(store: RecordStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.add_exit("sb-1", verdict={}, message="first", tail="", at=AT)

    def fail(_: Path) -> bytes:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr("driver_docker.records.read_regular", fail)
        with pytest.raises(RecordError, match="Input/output error"):
            store.add_exit("sb-1", verdict={}, message="second", tail="", at=AT)
    assert [entry["message"] for entry in store.exits("sb-1")] == ["first"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="file"):
        RecordStore(tmp_path / "file" / "state").open()


def test_a_state_folder_of_the_operators_own_stays(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    store = RecordStore(own / "namespace")
    store.open()
    store.forget()
    assert list(own.iterdir()) == []


def test_a_state_folder_that_others_can_change_is_refused(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    own.chmod(0o775)
    with pytest.raises(RecordError, match="chmod 700"):
        RecordStore(own / "namespace").open()
    assert list(own.iterdir()) == []


def test_the_folder_of_all_namespaces_is_owner_only_too(tmp_path: Path) -> None:
    store = RecordStore(tmp_path / "state" / "namespace")
    store.open()
    assert {path.stat().st_mode & 0o777 for path in (store.directory, store.directory.parent)} == {0o700}


@pytest.mark.parametrize(
    "sandbox_id", ["", ".", "..", "../other", "a/b", "/tmp", "a\0b", "x" * 129, "exits.jsonl", ".lock"]
)
def test_no_id_leads_out_of_the_folder_or_to_what_is_no_sandbox_in_it(store: RecordStore, sandbox_id: str) -> None:
    store.save(RECORD)
    (store.directory / "exits.jsonl").write_text("{}")
    (store.directory.parent / "other").mkdir()
    before = sorted(store.directory.parent.rglob("*"))
    calls: list[Callable[[], object]] = [
        lambda: store.save(replace(RECORD, sandbox_id=sandbox_id)),
        lambda: store.save_files(sandbox_id, {"x": b""}),
        lambda: store.commit_files(sandbox_id, {"x": b""}, last="x"),
        lambda: store.remove_files(sandbox_id, ("x",)),
        lambda: store.read_file(sandbox_id, "x"),
        lambda: store.add_exit(sandbox_id, verdict={}, message="", tail="", at=AT),
        lambda: store.exits(sandbox_id),
        lambda: store.remove(sandbox_id),
    ]
    for call in calls:
        with pytest.raises(RecordError, match="no sandbox can have the id"):
            call()
    assert sorted(store.directory.parent.rglob("*")) == before


def test_a_folder_that_no_sandbox_can_have_is_left_alone(store: RecordStore) -> None:
    (store.directory / ".hidden").mkdir()
    (store.directory / "sb-2").mkdir()
    assert store.load().without == ("sb-2",)


def test_a_file_that_goes_meanwhile_is_not_taken_for_an_absent_folder(
    store: RecordStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save_files("sb-1", {"supervisor-auth.json": b"secret"})

    def fail(_: Path) -> None:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr("shutil.rmtree", fail)
    with pytest.raises(RecordError, match="cannot be removed"):
        store.remove("sb-1")
    assert not store.remove("sb-2")


def test_what_writes_that_were_cut_left_goes(store: RecordStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.save_files("sb-1", {"supervisor-auth.json": b"old"})

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("pathlib.Path.replace", killed)
        patched.setattr("pathlib.Path.unlink", lambda *_, **__: None)  # a kill leaves no time for that
        with pytest.raises(KeyboardInterrupt):
            store.save_files("sb-1", {"supervisor-auth.json": b"new"})
        with pytest.raises(KeyboardInterrupt):
            store.save(RECORD)
    assert len(list((store.directory / "sb-1").iterdir())) == 3
    before = sorted(file.name for file in store.directory.iterdir())
    store.sweep()
    assert [file.name for file in (store.directory / "sb-1").iterdir()] == ["supervisor-auth.json"]
    assert sorted(file.name for file in store.directory.iterdir()) == before


@pytest.mark.parametrize("refused", ["iterdir", "unlink"])
def test_a_folder_that_cannot_be_cleared_keeps_nothing_in_the_others(
    store: RecordStore, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    for sandbox_id in ("sb-1", "sb-2", "sb-3"):
        store.save_files(sandbox_id, {"supervisor-auth.json": b"old"})
        folder = store.directory / sandbox_id
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr("pathlib.Path.replace", _killed)
            patched.setattr("pathlib.Path.unlink", lambda *_, **__: None)
            store.save_files(sandbox_id, {"supervisor-auth.json": b"new"})
        assert len(list(folder.iterdir())) == 2
    original = getattr(Path, refused)

    def refuse(path: Path, **keys: Any) -> Any:
        if "sb-2" in path.parts:
            raise OSError(errno.EIO, "Input/output error")
        return original(path, **keys)

    with monkeypatch.context() as patched, pytest.raises(RecordError, match=r"sb-2.*Input/output error"):
        patched.setattr(f"pathlib.Path.{refused}", refuse)
        store.sweep()
    assert [len(list((store.directory / each).iterdir())) for each in ("sb-1", "sb-2", "sb-3")] == [1, 2, 1]


def _killed(*_: object) -> None:
    raise KeyboardInterrupt
