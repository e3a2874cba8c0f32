"""Pipes and deep nesting where files are expected: every reader refuses them, and none waits or breaks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from driver_docker.config_sources import load_config
from driver_docker.docker_contexts import current_context
from driver_docker.errors import ConfigurationError, RecordError
from driver_docker.exit_journal import JOURNAL_FILE, ExitJournal
from driver_docker.preflight import judge_ca
from driver_docker.records import RecordStore
from driver_docker.regular_file import read_regular
from driver_docker.volume_admission import AdmissionDeniedError, decode_identities

if TYPE_CHECKING:
    from pathlib import Path

DEEP = b"[" * 100_000


def test_a_regular_file_is_read_through_a_link_and_up_to_a_limit(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"content")
    (tmp_path / "l").symlink_to("f")
    assert read_regular(tmp_path / "l") == b"content"
    assert read_regular(tmp_path / "f", limit_bytes=3) == b"con"


def test_a_pipe_or_folder_is_refused_unread(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p")
    for file in (tmp_path / "p", tmp_path):
        with pytest.raises(OSError, match=r"regular file|directory"):
            read_regular(file)


def test_a_record_that_is_a_pipe_is_an_unreadable_record(tmp_path: Path) -> None:
    store = RecordStore(tmp_path / "state" / "n")
    store.open()
    (store.directory / "sb-1").mkdir()
    os.mkfifo(store.directory / "sb-1" / "record.json")
    assert [each.sandbox_id for each in store.load().unreadable] == ["sb-1"]
    with pytest.raises(RecordError):
        store.read_file("sb-1", "record.json")


def test_a_driver_name_that_is_a_pipe_is_told(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".driver-owner")
    with pytest.raises(RecordError, match="regular file"):
        RecordStore(tmp_path).driver_name()


def test_a_journal_that_is_a_pipe_is_told_and_a_deeply_nested_line_is_skipped(tmp_path: Path) -> None:
    (tmp_path / JOURNAL_FILE).write_bytes(DEEP + b"\n")
    assert ExitJournal(tmp_path).read() == ()
    (tmp_path / JOURNAL_FILE).unlink()
    os.mkfifo(tmp_path / JOURNAL_FILE)
    with pytest.raises(RecordError, match="regular file"):
        ExitJournal(tmp_path).read()


def test_a_configuration_that_is_a_pipe_or_nested_too_deeply_is_told(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p")
    (tmp_path / "deep").write_bytes(b"x = " + DEEP)
    for name, word in (("p", "regular file"), ("deep", "nested too deeply")):
        with pytest.raises(ConfigurationError, match=word):
            load_config({}, file=tmp_path / name, environment={})


def test_dockers_own_configuration_nested_too_deeply_names_no_context(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(DEEP)
    assert current_context({"DOCKER_CONFIG": str(tmp_path)}) is None


def test_a_ca_that_is_a_pipe_is_a_finding(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "ca")
    assert "regular file" in str(judge_ca(tmp_path / "ca"))


def test_a_label_nested_too_deeply_denies_the_start() -> None:
    with pytest.raises(AdmissionDeniedError, match="cannot be read"):
        decode_identities(DEEP.decode())
