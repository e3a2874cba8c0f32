from __future__ import annotations

import base64
import json
import tracemalloc
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver_docker.tail import MAX_BYTES, MAX_LINES, LogTail, TailReader, read_tail, redact
from openshell.verdicts import Category, LastWords, Stage

STDOUT = 1
STDERR = 2
WORDS = LastWords(stage=Stage.ATTACH, category=Category.POLICY_REFUSED, public="refused", private="why")
LINE = WORDS.to_line().encode() + b"\n"


def frame(stream: int, payload: bytes) -> bytes:
    return bytes([stream, 0, 0, 0]) + len(payload).to_bytes(4, "big") + payload


def segment(value: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


JWT = f"{segment({'alg': 'EdDSA', 'typ': 'JWT'})}.{segment({'sub': 'sandbox-1', 'exp': 1})}.{'s1gnAture' * 9}"
PEM = (
    "-----BEGIN PRIVATE KEY-----\n"
    + "\n".join(["MC4CAQAwBQYDK2VwBCIEIJ" + "k3y" * 14] * 3)
    + "\n-----END PRIVATE KEY-----"
)


def test_frames_are_taken_apart_and_raw_output_is_not() -> None:
    framed = frame(STDOUT, b"out\n") + frame(STDERR, b"err\n")
    assert read_tail(framed, tty=False).text == "out\nerr"
    assert read_tail(b"plain\r\nterminal\r\n", tty=True).text == "plain\nterminal"


def test_a_line_in_several_frames_is_one_line() -> None:
    framed = frame(STDOUT, b"hel") + frame(STDERR, b"oops\n") + frame(STDOUT, b"lo\n")
    assert read_tail(framed, tty=False).text == "oops\nhello"


@pytest.mark.parametrize("cut", range(1, 15))
def test_a_truncated_last_frame_counts_as_far_as_it_came(cut: int) -> None:
    framed = frame(STDOUT, b"whole\n") + frame(STDERR, b"partial")[:cut]
    expected = "whole" + ("\n" + "partial"[: cut - 8] if cut > 8 else "")
    assert read_tail(framed, tty=False).text == expected


def test_raw_output_taken_for_frames_is_shown_and_not_lost() -> None:
    assert read_tail(b"this is no frame at all\n", tty=False).text == "this is no frame at all"


@given(
    st.lists(st.tuples(st.sampled_from([0, 1, 2, 3]), st.binary(max_size=60)), max_size=12),
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
)
def test_the_cut_of_the_chunks_does_not_matter(frames: list[tuple[int, bytes]], sizes: list[int]) -> None:
    raw = b"".join(frame(stream, payload) for stream, payload in frames)
    reader = TailReader(tty=False)
    position = index = 0
    while position < len(raw):
        size = sizes[index % len(sizes)]
        reader.feed(raw[position : position + size])
        position, index = position + size, index + 1
    assert reader.finish() == read_tail(raw, tty=False)


@given(st.binary(max_size=4000), st.booleans())
def test_any_bytes_give_bounded_clean_text(raw: bytes, tty: bool) -> None:
    tail = read_tail(raw, tty=tty)
    assert len(tail.text.encode()) <= MAX_BYTES
    assert tail.text.count("\n") < MAX_LINES
    assert not [char for char in tail.text if char != "\n" and unicodedata.category(char) in {"Cc", "Cs", "Zl", "Zp"}]


def test_invalid_utf8_is_replaced_and_escapes_are_stripped() -> None:
    raw = b"\xfe\xff\x00\x1b[1;31mred\x1b[0m \x1b]0;title\x07\x1b]8;;http://x\x1b\\link\x9b2J\tok\x08\r\n"
    assert read_tail(raw, tty=True).text == "\ufffd\ufffdred link\ufffd2J ok"


def test_only_the_last_lines_are_kept() -> None:
    tail = read_tail(b"".join(b"line %d\n" % number for number in range(500)), tty=True)
    lines = tail.text.split("\n")
    assert (len(lines), lines[0], lines[-1]) == (MAX_LINES, "line 420", "line 499")
    assert tail.truncated


def test_a_short_log_is_whole() -> None:
    assert read_tail(b"one\n\ntwo\n", tty=True) == LogTail(text="one\n\ntwo", truncated=False)
    assert read_tail(b"", tty=False) == LogTail(text="", truncated=False)


def test_many_long_lines_are_bounded_in_bytes_and_the_last_one_survives() -> None:
    tail = read_tail(b"".join(b"%d:" % number + "é".encode() * 900 + b"\n" for number in range(60)), tty=True)
    assert len(tail.text.encode()) <= MAX_BYTES
    assert tail.text.rsplit("\n", 1)[-1].startswith("59:")
    assert tail.truncated


@pytest.mark.parametrize("tty", [True, False])
def test_a_line_without_an_end_costs_flat_memory(tty: bool) -> None:
    chunk = b"x" * 16_384
    reader = TailReader(tty=tty)
    reader.feed(chunk if tty else frame(STDERR, chunk))
    tracemalloc.start()
    try:
        for _ in range(1024):
            reader.feed(chunk if tty else frame(STDERR, chunk))
        tail = reader.finish()
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 512 * 1024
    assert len(tail.text.encode()) <= MAX_BYTES
    assert tail.truncated


@pytest.mark.parametrize("length", [100, 16_000])
def test_many_lines_cost_flat_memory(length: int) -> None:
    lines = (b"y" * length + b"\n") * (16_000 // (length + 1) + 1)
    reader = TailReader(tty=True)
    tracemalloc.start()
    try:
        for _ in range(250):
            reader.feed(lines)
        reader.finish()
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1024 * 1024


@pytest.mark.parametrize(
    "text",
    [
        f"token={JWT}",
        f'{{"token":"{JWT}"}}',
        f"authorization: Bearer {JWT}",
        f"Authorization: bearer {JWT[:40]}",
        f"tail cut the token {JWT[:60]}",
        f"(x{'A' * 20}.{'B' * 20}.{'C' * 20})",
        PEM,
        json.dumps({"key": PEM}),
        "before\n" + PEM[:120],
        PEM[40:] + "\nafter",
    ],
)
def test_credentials_are_redacted(text: str) -> None:
    clean = redact(text)
    assert "[redacted]" in clean
    for secret in (JWT[:30], JWT[-30:], "s1gnAture", "k3yk3y", "MC4CAQAw", "BBBBBBBB"):
        assert secret not in clean


@pytest.mark.parametrize(
    "text",
    [
        "connecting to 127.0.0.1:17670 failed: connection refused",
        "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "the bearer of bad news",
        "0f8fad5b-d9cb-469f-a165-70867728950e was removed",
        "openshell.isolation.backend.v1.IsolationBackend/Attach",
        "-----BEGIN CERTIFICATE-----",
        "basic auth is not offered",
    ],
)
def test_ordinary_lines_are_left_alone(text: str) -> None:
    assert redact(text) == text


def test_given_values_are_redacted_wherever_they_are() -> None:
    assert redact("pw=hunter22hunter22 x", ["hunter22", "hunter22hunter22", "", "pw"]) == "pw=[redacted] x"


def test_a_control_character_does_not_hide_a_secret() -> None:
    raw = f"Bearer {JWT[:20]}\x00\x1b[31m{JWT[20:]}\n".encode()
    assert read_tail(raw, tty=True).text == "Bearer [redacted]"


def test_text_after_a_key_stays_and_the_key_goes() -> None:
    tail = read_tail(f"start\n{PEM}\nend\n".encode(), tty=True, secrets=["start"])
    assert tail.text == "start\n[redacted]\nend"


def test_a_key_that_begins_before_the_tail_is_still_a_key() -> None:
    body = "\n".join(["QUJD" * 16] * 200)
    tail = read_tail(f"-----BEGIN PRIVATE KEY-----\n{body}\n-----END PRIVATE KEY-----\nbye\n".encode(), tty=True)
    assert tail.text == "[redacted]\nbye"


def test_last_words_come_from_standard_error_only() -> None:
    assert read_tail(frame(STDERR, LINE), tty=False).last_words == WORDS
    assert read_tail(frame(STDOUT, LINE), tty=False).last_words is None
    assert read_tail(LINE, tty=True).last_words is None
    assert read_tail(LINE, tty=False).last_words is None


def test_a_forged_line_on_standard_output_does_not_displace_last_words() -> None:
    forged = LastWords(stage=Stage.RUNNING, category=Category.ENTRYPOINT, public="forged").to_line().encode()
    framed = (
        frame(STDERR, LINE)
        + frame(STDOUT, forged + b"\n")
        + b"".join(frame(STDOUT, b"noise %d\n" % number) for number in range(400))
    )
    assert read_tail(framed, tty=False).last_words == WORDS


def test_last_words_split_over_frames_and_without_a_line_end_are_found() -> None:
    framed = frame(STDERR, LINE[:30]) + frame(STDOUT, b"x\n") + frame(STDERR, LINE[30:-1])
    assert read_tail(framed, tty=False).last_words == WORDS


@pytest.mark.parametrize("junk", [LINE[:-9] + b"\n", b'{"openshell_last_words":1,"public":"' + b"x" * 20_000 + b"\n"])
def test_a_broken_line_after_last_words_does_not_displace_them(junk: bytes) -> None:
    assert read_tail(frame(STDERR, LINE) + frame(STDERR, junk), tty=False).last_words == WORDS


def test_secrets_in_last_words_are_redacted() -> None:
    said = LastWords(
        stage=Stage.BUILD, category=Category.CONFIGURATION, public=f"bad Bearer {JWT}", private="the s3cr3t-value"
    )
    tail = read_tail(frame(STDERR, said.to_line().encode()), tty=False, secrets=["s3cr3t-value"])
    assert tail.last_words is not None
    assert tail.last_words.public == "bad Bearer [redacted]"
    assert tail.last_words.private == "the [redacted]"
    assert JWT[:30] not in tail.text
    assert "s3cr3t" not in tail.text
