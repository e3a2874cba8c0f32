"""Looking for one line in a log that arrives in pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver_docker.log_frames import LineSearch, LogFrames

STDOUT, STDERR = 1, 2
LINE = '{"openshell_ready":1}'


def frame(stream: int, payload: bytes) -> bytes:
    return bytes([stream, 0, 0, 0]) + len(payload).to_bytes(4, "big") + payload


def found(log: bytes) -> bool:
    return LineSearch(LINE).feed(log)


@pytest.mark.parametrize(
    "payloads",
    [
        [LINE + "\n"],
        ["before\n", LINE + "\n", "after\n"],
        ["before\n" + LINE + "\nafter"],
        [LINE[:5], LINE[5:], "\n"],
        ["x" * 100_000 + "\n" + LINE + "\n"],
    ],
)
def test_a_whole_line_is_found(payloads: list[str]) -> None:
    assert found(b"".join(frame(STDERR, each.encode()) for each in payloads))


@pytest.mark.parametrize(
    "log",
    [
        b"",
        frame(STDOUT, f"{LINE}\n".encode()),
        frame(STDERR, LINE.encode()),
        frame(STDERR, f" {LINE}\n".encode()),
        frame(STDERR, f"{LINE} \n".encode()),
        frame(STDERR, f"{LINE}{LINE}\n".encode()),
        frame(STDERR, f'{{"event":"{LINE}"}}\n'.encode()),
        frame(STDERR, LINE[:5].encode()) + frame(STDOUT, f"{LINE[5:]}\n".encode()),
        f"{LINE}\n".encode(),
    ],
    ids=["nothing", "stdout", "no end", "before it", "after it", "twice", "quoted", "half of it", "no frames"],
)
def test_what_is_not_the_line_is_not_found(log: bytes) -> None:
    assert not found(log)


@given(
    before=st.lists(st.tuples(st.sampled_from([STDOUT, STDERR]), st.binary(max_size=60)), max_size=6),
    cuts=st.lists(st.integers(min_value=1, max_value=40), min_size=1),
)
def test_where_the_pieces_are_cut_does_not_matter(before: list[tuple[int, bytes]], cuts: list[int]) -> None:
    log = b"".join(frame(stream, data + b"\n") for stream, data in before) + frame(STDERR, f"{LINE}\n".encode())
    search, seen, number = LineSearch(LINE), False, 0
    while log:
        size = cuts[number % len(cuts)]
        seen |= search.feed(log[:size])
        log, number = log[size:], number + 1
    assert seen


@given(st.lists(st.tuples(st.sampled_from([0, 1, 2]), st.binary(max_size=50)), max_size=8), st.integers(0, 20))
def test_frames_are_removed_however_the_last_one_is_cut(frames: list[tuple[int, bytes]], cut: int) -> None:
    log = b"".join(frame(stream, body) for stream, body in frames)
    plain = b"".join(body for _, body in frames)
    assert b"".join(part for _, part in LogFrames(tty=False).split(log)) == plain
    kept = b"".join(part for _, part in LogFrames(tty=False).split(log[: max(0, len(log) - cut)]))
    assert plain.startswith(kept)
