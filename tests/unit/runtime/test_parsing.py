"""Lines and records of the kernel."""

from __future__ import annotations

import json
import signal
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_runtime.logs import Level, Log, level_from_environment
from sandbox_runtime.reaper import EndStatus
from sandbox_runtime.signals import ReceivedSignal, parse_records
from sandbox_runtime.tree import ProcessEntry, descendants, liveliest, parse_stat


def stat_line(pid: int, command: bytes, state: str, parent: int, start: int, threads: int = 1) -> bytes:
    skipped = b" ".join([b"0"] * 15)
    numbers = b"%d %s %d 0 %d 0 0 0" % (parent, skipped, threads, start)
    return b"%d (%s) %s %s\n" % (pid, command, state.encode(), numbers)


@given(
    pid=st.integers(1, 2**22),
    command=st.binary(max_size=15).filter(lambda name: b"\0" not in name),
    state=st.sampled_from("RSDTtZXI"),
    parent=st.integers(0, 2**22),
    start=st.integers(0, 2**60),
    threads=st.integers(0, 5000),
)
def test_a_stat_line_is_read_whatever_the_command_is_called(
    pid: int, command: bytes, state: str, parent: int, start: int, threads: int
) -> None:
    expected = ProcessEntry(pid=pid, parent_pid=parent, state=state, start_ticks=start, threads=threads)
    assert parse_stat(stat_line(pid, command, state, parent, start, threads)) == expected


@given(st.binary(max_size=200))
def test_anything_else_is_an_entry_or_a_value_error(data: bytes) -> None:
    try:
        parse_stat(data)
    except ValueError:
        return


def entry(pid: int, parent: int) -> ProcessEntry:
    return ProcessEntry(pid=pid, parent_pid=parent, state="S", start_ticks=0)


def test_descendants_are_found_parents_first_and_strangers_are_not() -> None:
    entries = [entry(1, 0), entry(50, 7), entry(7, 1), entry(99, 0), entry(100, 99), entry(8, 1), entry(51, 50)]
    found = [process.pid for process in descendants(entries, 1)]
    assert sorted(found) == [7, 8, 50, 51]
    assert found.index(7) < found.index(50) < found.index(51)


@pytest.mark.parametrize(
    ("states", "process"), [("S", "S"), ("ZR", "R"), ("TTS", "S"), ("TD", "D"), ("ZT", "T"), ("ZZ", "Z"), ("", "Z")]
)
def test_a_process_is_as_alive_as_its_liveliest_thread(states: str, process: str) -> None:
    assert liveliest(states) == process


def test_a_loop_in_a_torn_listing_ends() -> None:
    assert len(descendants([entry(2, 3), entry(3, 2), entry(4, 1)], 1)) == 1


def record(number: int, sender: int) -> bytes:
    return struct.pack("=IiiI", number, 0, 0, sender).ljust(128, b"\0")


def test_signal_records_name_number_and_sender() -> None:
    assert parse_records(record(15, 0) + record(17, 42) + b"torn") == (
        ReceivedSignal(number=signal.SIGTERM, sender_pid=0),
        ReceivedSignal(number=signal.SIGCHLD, sender_pid=42),
    )


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (EndStatus(exit_code=0), 0, "exited with code 0"),
        (EndStatus(exit_code=42), 42, "exited with code 42"),
        (EndStatus(signal_number=9), 137, "ended by SIGKILL"),
        (EndStatus(signal_number=40), 168, "ended by signal 40"),
    ],
)
def test_ends_in_the_shells_code_and_in_words(status: EndStatus, code: int, words: str) -> None:
    assert status.shell_code == code
    assert str(status) == words


def test_a_log_line_is_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    log = Log(Level.INFO)
    log.debug("unseen")
    log.warning("two\nlines", path="/a b", count=2)
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    found = json.loads(line)
    assert found.pop("timestamp").endswith("Z")
    assert found == {"level": "warning", "event": "two\nlines", "path": "/a b", "count": 2}


@pytest.mark.parametrize(
    ("value", "level"),
    [
        ("debug", Level.DEBUG),
        ("TRACE", Level.DEBUG),
        ("warn", Level.WARNING),
        ("error", Level.ERROR),
        ("?", Level.INFO),
    ],
)
def test_the_level_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, value: str, level: Level) -> None:
    monkeypatch.setenv("OPENSHELL_LOG_LEVEL", value)
    assert level_from_environment() is level
