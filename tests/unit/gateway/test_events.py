from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway_embedded.errors import CursorExpiredError, SlowReaderError
from gateway_embedded.events import PINNED_LIMIT, TAIL_LIMIT, Change, EventHub, StreamItem, is_lasting
from gateway_embedded.sandboxes import PlatformEvent


def progress(number: int) -> PlatformEvent:
    return PlatformEvent(source="docker", type="Normal", reason=f"p{number}", message="")


def verdict(number: int) -> PlatformEvent:
    metadata = {"openshell.verdict.kind": "exited"}
    return PlatformEvent(source="docker", type="Normal", reason=f"v{number}", message="", metadata=metadata)


def reasons(items: list[StreamItem]) -> list[str]:
    return [item.content.reason for item in items if isinstance(item.content, PlatformEvent)]


async def test_progress_does_not_push_a_verdict_out_of_the_tail() -> None:
    hub = EventHub()
    hub.publish_event("s", verdict(0))
    for number in range(3 * TAIL_LIMIT):
        hub.publish_event("s", progress(number))
    with hub.subscribe("s", event_tail=TAIL_LIMIT + 1) as reader:
        assert reasons(reader.earlier)[0] == "v0"
        assert len(reader.earlier) == TAIL_LIMIT + 1
    with hub.subscribe("s", event_tail=2) as reader:
        assert reasons(reader.earlier) == [f"p{3 * TAIL_LIMIT - 2}", f"p{3 * TAIL_LIMIT - 1}"]
    with hub.subscribe("s") as reader:
        assert reader.earlier == []


@pytest.mark.parametrize(
    ("kind", "metadata", "lasting"),
    [
        ("Warning", {}, True),
        ("Normal", {"openshell.verdict.kind": "stopped"}, True),
        ("Normal", {"openshell.progress.active_step": "pulling_image"}, False),
        ("Normal", {}, False),
    ],
)
def test_warnings_and_verdicts_last(kind: str, metadata: dict[str, str], lasting: bool) -> None:
    event = PlatformEvent(source="docker", type=kind, reason="r", message="", metadata=metadata)
    assert is_lasting(event) is lasting


async def test_the_tail_is_in_order_and_without_repeats() -> None:
    hub = EventHub()
    for number in range(4):
        hub.publish_event("s", progress(number))
        hub.publish_event("s", verdict(number))
    with hub.subscribe("s", event_tail=100) as reader:
        assert reasons(reader.earlier) == ["p0", "v0", "p1", "v1", "p2", "v2", "p3", "v3"]


async def test_events_of_an_earlier_process_are_in_the_tail() -> None:
    hub = EventHub()
    hub.restore([("s", verdict(1)), ("t", verdict(2))])
    hub.publish_event("s", progress(1))
    with hub.subscribe("s", event_tail=9) as reader:
        assert reasons(reader.earlier) == ["v1", "p1"]


async def test_a_reader_gets_what_comes_after_the_tail_and_the_end() -> None:
    hub = EventHub()
    hub.publish_event("s", progress(1))
    with hub.subscribe("s", event_tail=1) as reader:
        hub.publish_event("s", progress(2))
        hub.publish_event("other", progress(3))
        hub.publish_removal("s")
        items = [await reader.get(), await reader.get()]
    assert [item.content if item else None for item in items] == [progress(2), Change.REMOVED]


async def test_a_slow_reader_loses_its_stream_and_the_others_do_not() -> None:
    hub = EventHub(reader_limit=3)
    with hub.subscribe("s") as slow, hub.subscribe("s") as quick:
        for number in range(4):
            hub.publish_event("s", progress(number))
            item = await quick.get()
            assert item is not None
            assert item.content == progress(number)
        with pytest.raises(SlowReaderError, match="fell more than 3"):
            await slow.get()


async def test_the_end_lets_a_reader_take_what_is_queued() -> None:
    hub = EventHub()
    with hub.subscribe("s") as reader:
        waiting = asyncio.create_task(reader.get())
        await asyncio.sleep(0)
        hub.publish_event("s", progress(1))
        hub.publish_event("s", progress(2))
        hub.end()
        first = await waiting
        second = await reader.get()
        assert [item.content if item else None for item in (first, second)] == [progress(1), progress(2)]
        assert await reader.get() is None


@given(st.lists(st.booleans(), max_size=30), st.integers(0, 30))
def test_resuming_after_any_cursor_misses_and_repeats_nothing(kinds: list[bool], seen: int) -> None:
    hub = EventHub()
    published = [verdict(number) if kind else progress(number) for number, kind in enumerate(kinds)]
    for event in published:
        hub.publish_event("s", event)
    seen = min(seen, len(published))
    with hub.subscribe("s", resume_after=hub.cursor(seen)) as reader:
        assert [item.content for item in reader.earlier] == published[seen:]


async def test_a_cursor_outside_of_what_is_kept_is_refused() -> None:
    hub = EventHub()
    for number in range(TAIL_LIMIT + 1):
        hub.publish_event("s", progress(number))
    with hub.subscribe("s", resume_after=hub.cursor(1)):
        pass
    other = EventHub()
    for cursor in (
        hub.cursor(0),
        hub.cursor(hub.latest + 1),
        other.cursor(1),
        "",
        "x",
        "-",
        f"{hub.cursor(1)}x",
        "é-1",
    ):
        if cursor:
            with pytest.raises(CursorExpiredError):
                hub.subscribe("s", resume_after=cursor)
    for number in range(PINNED_LIMIT + 1):
        hub.publish_event("t", verdict(number))
    with pytest.raises(CursorExpiredError):
        hub.subscribe("t", resume_after=hub.cursor(TAIL_LIMIT + 1))


async def test_nothing_is_kept_of_a_sandbox_that_is_gone() -> None:
    hub = EventHub()
    hub.publish_event("s", verdict(1))
    hub.publish_removal("s")
    with hub.subscribe("s", event_tail=9) as reader:
        assert reader.earlier == []
