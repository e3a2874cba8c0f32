"""The journal of verdicts: bounded, owner-only, whole after a crash, kept when the last sandbox goes."""

from __future__ import annotations

import stat
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest

from driver_docker import exit_journal
from driver_docker.atomic_file import replace_file
from driver_docker.errors import RecordError
from driver_docker.exit_journal import JOURNAL_FILE, ExitJournal, JournalEntry
from driver_docker.records import RecordStore

AT = datetime(2026, 10, 5, 12, tzinfo=UTC)


def entry(number: int, *, sandbox_id: str = "sb-1", tail: str = "") -> JournalEntry:
    return JournalEntry(
        at=AT,
        sandbox_id=sandbox_id,
        name="steady",
        workspace="default",
        message=f"exit {number}",
        verdict={"openshell.verdict.exit_code": str(number)},
        tail=tail,
    )


def test_verdicts_are_read_back_oldest_first_and_by_sandbox(tmp_path: Path) -> None:
    journal = ExitJournal(tmp_path)
    assert journal.read() == ()
    for number in range(5):
        journal.append(entry(number, sandbox_id=f"sb-{number % 2}", tail="last\nline \udcff"))
    assert [found.message for found in ExitJournal(tmp_path).read()] == [f"exit {number}" for number in range(5)]
    assert ExitJournal(tmp_path).read(limit=2)[0] == entry(3, sandbox_id="sb-1", tail="last\nline \udcff")
    assert [found.message for found in journal.read(of="sb-0")] == ["exit 0", "exit 2", "exit 4"]


def test_only_the_owner_may_read_it(tmp_path: Path) -> None:
    ExitJournal(tmp_path).append(entry(1))
    assert stat.S_IMODE((tmp_path / JOURNAL_FILE).stat().st_mode) == 0o600


def test_a_line_that_a_crash_cut_costs_only_itself(tmp_path: Path) -> None:
    journal = ExitJournal(tmp_path)
    journal.append(entry(1))
    file = tmp_path / JOURNAL_FILE
    file.write_bytes(file.read_bytes() + file.read_bytes()[:40])
    journal.append(entry(2))
    assert [found.message for found in journal.read()] == ["exit 1", "exit 2"]


def test_it_stays_bounded_in_entries_and_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exit_journal, "MAX_ENTRIES", 10)
    monkeypatch.setattr(exit_journal, "MAX_BYTES", 4000)
    journal, file = ExitJournal(tmp_path), tmp_path / JOURNAL_FILE
    for number in range(100):
        journal.append(entry(number))
        assert len(file.read_bytes().splitlines()) <= 20
    assert journal.read()[-1].message == "exit 99"
    for number in range(100, 130):
        journal.append(entry(number, tail="x" * 1500))
        assert file.stat().st_size <= 8000 + 2000
    assert journal.read()[-1].message == "exit 129"


def test_a_verdict_that_arrives_while_the_file_is_cut_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exit_journal, "MAX_ENTRIES", 2)
    others: list[threading.Thread] = []

    def replace_slowly(file: Path, data: bytes) -> None:
        if others:
            replace_file(file, data)
            return
        other = threading.Thread(target=ExitJournal(tmp_path).append, args=(entry(99),))
        others.append(other)
        other.start()
        other.join(0.2)  # it can only be done by now if nothing keeps it from writing
        replace_file(file, data)

    monkeypatch.setattr(exit_journal, "replace_file", replace_slowly)
    for number in range(5):
        ExitJournal(tmp_path).append(entry(number))
    for other in others:
        other.join()
    assert others
    assert "exit 99" in [found.message for found in ExitJournal(tmp_path).read()]


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    (tmp_path / JOURNAL_FILE).symlink_to(target)
    with pytest.raises(RecordError):
        ExitJournal(tmp_path).append(entry(1))
    assert not target.exists()


def test_the_folder_stays_while_it_holds_verdicts(tmp_path: Path) -> None:
    store = RecordStore(tmp_path / "state" / "ns")
    name = store.open()
    ExitJournal(store.directory).append(entry(1))
    store.forget()
    assert ExitJournal(store.directory).read() == (entry(1),)
    assert store.open() == store.driver_name() == name
    (store.directory / JOURNAL_FILE).unlink()
    store.forget()
    assert not store.directory.exists()
    assert store.driver_name() is None
