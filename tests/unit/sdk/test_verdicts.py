from __future__ import annotations

import json
import subprocess
import sys
import unicodedata
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from openshell.verdicts import (
    MAX_MESSAGE_BYTES,
    MAX_WORDS_BYTES,
    METADATA_PREFIX,
    Category,
    Component,
    KilledBy,
    LastWords,
    Stage,
    Verdict,
    VerdictKind,
    clean_text,
    signal_name,
)

FINISHED = datetime(2026, 10, 5, 12, 30, 15, 250_000, tzinfo=UTC)

any_text = st.text(max_size=3000) | st.text(alphabet=" :;,\n\t\x1b\x00:", max_size=40)
zones = st.timezones() | st.just(UTC) | st.just(timezone(timedelta(hours=14)))

verdicts = st.builds(
    Verdict,
    kind=st.sampled_from(VerdictKind),
    reason=any_text,
    component=st.sampled_from(Component),
    exit_code=st.none() | st.integers(-5, 300) | st.integers(),
    signal=st.none() | st.sampled_from(["SIGKILL", "SIGTERM", "SIGSEGV"]) | any_text,
    killed_by=st.none() | st.sampled_from(KilledBy),
    started_at=st.none() | st.datetimes(timezones=st.none() | zones),
    finished_at=st.none() | st.datetimes(timezones=st.none() | zones),
    memory_limit_bytes=st.none() | st.integers(),
    engine_error=any_text,
    words=any_text,
    stage=st.none() | st.sampled_from(Stage),
    category=st.none() | st.sampled_from(Category),
    generation=any_text,
)


def verdict(kind: VerdictKind, **changes: object) -> Verdict:
    facts: dict[str, object] = {
        "kind": kind,
        "reason": "ControlSupervisorExited",
        "component": Component.SUPERVISOR,
        "finished_at": FINISHED,
    }
    return Verdict(**{**facts, **changes})  # type: ignore[arg-type]


@given(verdicts)
@example(verdict(VerdictKind.EXITED, exit_code=1, words="cannot bind: ::: :"))
@example(verdict(VerdictKind.COULD_NOT_RUN, engine_error="é" * 5000, words="ü" * 5000))
def test_a_message_is_one_bounded_clean_sentence_whatever_the_facts(judged: Verdict) -> None:
    message = judged.message
    assert message.strip() == message != ""
    assert not message.endswith(":")
    assert len(message.encode()) <= MAX_MESSAGE_BYTES == 1024
    assert not [char for char in message if unicodedata.category(char)[0] == "C" or char in "\u2028\u2029"]


@given(verdicts)
def test_a_verdict_survives_its_own_metadata(judged: Verdict) -> None:
    metadata = judged.to_metadata()
    assert all(key.startswith(METADATA_PREFIX) and value for key, value in metadata.items())
    assert Verdict.from_metadata(metadata) == judged


@given(
    st.dictionaries(
        st.sampled_from([METADATA_PREFIX + name for name in Verdict.__dataclass_fields__] + ["other"]),
        any_text | st.none() | st.integers() | st.binary(max_size=8),
    )
)
@example({METADATA_PREFIX + "kind": "exited", METADATA_PREFIX + "exit_code": "\uff19"})
@example({METADATA_PREFIX + "kind": "exited", METADATA_PREFIX + "exit_code": "9" * 5000})
@example({METADATA_PREFIX + "kind": "exited", METADATA_PREFIX + "finished_at": "0001-01-01T00:00:00+14:00"})
def test_reading_a_peers_metadata_never_raises(metadata: dict[str, object]) -> None:
    read = Verdict.from_metadata(metadata)  # type: ignore[arg-type]
    assert read is None or read.message


def test_metadata_without_a_kind_holds_no_verdict() -> None:
    assert Verdict.from_metadata({}) is None
    assert Verdict.from_metadata({METADATA_PREFIX + "exit_code": "1", "image_ref": "x"}) is None


def test_values_of_a_newer_peer_become_unknown_and_keep_the_rest() -> None:
    metadata = {
        METADATA_PREFIX + "kind": "evicted",
        METADATA_PREFIX + "component": "sidecar",
        METADATA_PREFIX + "killed_by": "scheduler",
        METADATA_PREFIX + "stage": "warmup",
        METADATA_PREFIX + "category": "quota",
        METADATA_PREFIX + "exit_code": "7",
        METADATA_PREFIX + "finished_at": "yesterday",
        METADATA_PREFIX + "signal": "not a signal",
    }
    read = Verdict.from_metadata(metadata)
    assert read is not None
    assert (read.kind, read.component, read.killed_by) == (VerdictKind.UNKNOWN, Component.UNKNOWN, KilledBy.UNKNOWN)
    assert (read.stage, read.category) == (Stage.UNKNOWN, Category.UNKNOWN)
    assert (read.exit_code, read.finished_at, read.signal) == (7, None, None)
    assert "exit code 7" in read.message


def test_the_metadata_keys_are_the_documented_ones() -> None:
    full = verdict(
        VerdictKind.SIGNALED,
        exit_code=137,
        signal="SIGKILL",
        killed_by=KilledBy.UNKNOWN,
        started_at=FINISHED,
        memory_limit_bytes=1 << 26,
        engine_error="cause",
        words="said",
        stage=Stage.ATTACH,
        category=Category.CONFIGURATION,
        generation="g1",
    )
    assert full.to_metadata() == {
        "openshell.verdict.kind": "signaled",
        "openshell.verdict.reason": "ControlSupervisorExited",
        "openshell.verdict.component": "supervisor",
        "openshell.verdict.exit_code": "137",
        "openshell.verdict.signal": "SIGKILL",
        "openshell.verdict.killed_by": "unknown",
        "openshell.verdict.started_at": "2026-10-05T12:30:15.250000+00:00",
        "openshell.verdict.finished_at": "2026-10-05T12:30:15.250000+00:00",
        "openshell.verdict.memory_limit": "67108864",
        "openshell.verdict.engine_error": "cause",
        "openshell.verdict.words": "said",
        "openshell.verdict.stage": "attach",
        "openshell.verdict.category": "configuration",
        "openshell.verdict.generation": "g1",
    }


@pytest.mark.parametrize("kind", [kind for kind in VerdictKind if verdict(kind).is_exit])
def test_every_exit_names_its_code(kind: VerdictKind) -> None:
    assert "code 137" in verdict(kind, exit_code=137, signal="SIGKILL").message
    unknown = verdict(kind).message
    assert "code" in unknown
    assert "unknown" in unknown
    assert "at 2026-10-05T12:30:15Z" in unknown


@pytest.mark.parametrize(
    "kind",
    [
        VerdictKind.REMOVED,
        VerdictKind.OUT_OF_MEMORY,
        VerdictKind.KILLED_THROUGH_ENGINE,
        VerdictKind.SIGNALED,
    ],
)
def test_an_exit_by_signal_names_the_signal(kind: VerdictKind) -> None:
    assert "SIGKILL" in verdict(kind, exit_code=137, signal="SIGKILL").message


def test_a_death_by_signal_is_hedged() -> None:
    killed = verdict(VerdictKind.SIGNALED, exit_code=137, signal="SIGKILL", killed_by=KilledBy.UNKNOWN)
    assert "usually means that it was killed by SIGKILL (sender unknown, lack of memory is possible)" in killed.message
    crashed = verdict(VerdictKind.SIGNALED, exit_code=139, signal="SIGSEGV", killed_by=KilledBy.UNKNOWN)
    assert "a program may also return that number" in crashed.message
    asked = verdict(VerdictKind.SIGNALED, exit_code=143, signal="SIGTERM", killed_by=KilledBy.ENGINE_CLIENT)
    assert "sent through the engine" in asked.message


@pytest.mark.parametrize(("code", "hint"), [(126, "not executable"), (127, "not found"), (128, "could not run (")])
def test_a_process_that_could_not_run_says_why(code: int, hint: str) -> None:
    assert hint in verdict(VerdictKind.COULD_NOT_RUN, exit_code=code).message
    # An engine gives the same codes for other errors, as a mount that failed: its own words alone count then.
    judged = verdict(VerdictKind.COULD_NOT_RUN, exit_code=code, engine_error='exec: "/x": no such thing:')
    assert "could not run (" in judged.message
    assert judged.message.endswith('the engine says: exec: "/x": no such thing')


def test_last_words_are_quoted_with_stage_and_category() -> None:
    judged = verdict(
        VerdictKind.EXITED,
        exit_code=3,
        words="gateway refused the connection",
        stage=Stage.BUILD,
        category=Category.INFRASTRUCTURE,
    )
    assert judged.message == (
        "control supervisor exited with code 3 at 2026-10-05T12:30:15Z; "
        "last words (build, infrastructure): gateway refused the connection"
    )


@pytest.mark.parametrize("kind", VerdictKind)
def test_only_ends_that_nobody_wanted_are_failures(kind: VerdictKind) -> None:
    quiet = {
        VerdictKind.STOPPED,
        VerdictKind.FOLLOWED_WORKLOAD,
        VerdictKind.STILL_RUNNING,
        VerdictKind.ENGINE_UNREACHABLE,
    }
    assert verdict(kind).is_failure == (kind not in quiet)


def test_a_workload_that_exits_with_0_by_itself_has_completed() -> None:
    done = verdict(VerdictKind.ENDED_UNASKED, component=Component.WORKLOAD, exit_code=0)
    assert (done.is_completion, done.is_failure) == (True, False)
    assert done.message.startswith("workload container completed with code 0")
    lost = verdict(VerdictKind.ENDED_UNASKED, component=Component.SUPERVISOR, exit_code=0)
    assert (lost.is_completion, lost.is_failure) == (False, True)


def test_the_memory_limit_is_shown_in_a_readable_unit() -> None:
    for size_bytes, shown in ((64 << 20, "64 MiB"), (3 << 30, "3 GiB"), (6291457, "6291457 bytes")):
        killed = verdict(VerdictKind.OUT_OF_MEMORY, exit_code=137, memory_limit_bytes=size_bytes)
        assert f"memory limit {shown}" in killed.message


@pytest.mark.parametrize(("number", "name"), [(1, "SIGHUP"), (9, "SIGKILL"), (15, "SIGTERM"), (31, "SIGSYS")])
def test_signals_have_their_linux_names(number: int, name: str) -> None:
    assert signal_name(number) == name


@pytest.mark.parametrize("number", [-1, 0, 32, 64, 128])
def test_numbers_that_are_no_classic_signal_have_no_name(number: int) -> None:
    assert signal_name(number) is None


@given(st.text(max_size=4000), st.integers(3, 600))
def test_clean_text_is_bounded_idempotent_and_free_of_controls(text: str, max_bytes: int) -> None:
    clean = clean_text(text, max_bytes=max_bytes)
    assert len(clean.encode()) <= max_bytes
    assert clean_text(clean, max_bytes=max_bytes) == clean
    assert not [char for char in clean if unicodedata.category(char)[0] == "C"]


words = st.builds(
    LastWords,
    stage=st.sampled_from(Stage),
    category=st.sampled_from(Category),
    public=any_text,
    private=any_text,
)


@given(words, st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=200))
def test_last_words_are_found_behind_other_output(said: LastWords, noise: str) -> None:
    line = said.to_line()
    assert line.isascii()
    assert len(line) < 16 * 1024
    assert line == line.splitlines()[0]
    assert LastWords.find_in(f"{noise}\n{line}\n") == said


def test_the_last_of_several_lines_counts_and_broken_ones_are_skipped() -> None:
    first = LastWords(stage=Stage.BUILD, category=Category.CONFIGURATION, public="first")
    second = LastWords(stage=Stage.ATTACH, category=Category.POLICY_REFUSED, public="second")
    tail = "\n".join([first.to_line(), second.to_line(), second.to_line()[:-5], "goodbye"])
    assert LastWords.find_in(tail) == second


@pytest.mark.parametrize(
    "line",
    [
        "",
        "openshell_last_words",
        '{"openshell_last_words":1',
        '{"openshell_last_words":true,"stage":"build"}',
        '{"openshell_last_words":0}',
        '{"openshell_last_words":"1"}',
        '["openshell_last_words",1]',
        '{"nested":{"openshell_last_words":1}}',
        '{"openshell_last_words":' + "[" * 8000 + "}",
        '{"openshell_last_words":1,"public":"' + "x" * 20_000 + '"}',
        'log: {"openshell_last_words":1}',
    ],
)
def test_lines_that_only_look_like_last_words_are_not(line: str) -> None:
    assert LastWords.find_in(line) is None


def test_last_words_of_a_newer_supervisor_keep_their_text() -> None:
    line = json.dumps(
        {"openshell_last_words": 2, "stage": "warmup", "category": 5, "public": "hm\x1b[31m", "extra": {}}
    )
    said = LastWords.find_in(line)
    assert said is not None
    assert (said.stage, said.category, said.private) == (Stage.UNKNOWN, Category.UNKNOWN, "")
    assert said.public == "hm [31m"


def test_private_words_do_not_show_in_a_representation() -> None:
    said = LastWords(stage=Stage.BUILD, category=Category.CONFIGURATION, public="p", private="s3cr3t")
    assert "s3cr3t" not in repr(said)
    assert len(LastWords(stage=Stage.BUILD, category=Category.CONFIGURATION, public="é" * 900).public.encode()) <= (
        MAX_WORDS_BYTES
    )


def test_importing_the_vocabulary_loads_no_wire_code() -> None:
    script = (
        "import sys, openshell.verdicts;"
        "print([m for m in sys.modules if m.split('.')[0] in {'grpc','google','betterproto2','rich','click'}])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
