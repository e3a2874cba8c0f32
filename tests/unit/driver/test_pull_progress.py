"""A big pull does not flood watchers, every layer gets its turn, and the last state is always told."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver_docker.engine_objects import PullProgress
from driver_docker.events import byte_text, pulling_layer
from driver_docker.pull_progress import INTERVAL_SECONDS, MAX_EVENTS_PER_SECOND, MAX_LAST_EVENTS, ProgressPacer
from driver_docker.services import now

if TYPE_CHECKING:
    from collections.abc import Callable


class StepClock:
    """A clock that moves when it is told to, and rings its timers on the way."""

    def __init__(self) -> None:
        self.now = 100.0
        self._loop = asyncio.new_event_loop()
        self.timers: list[tuple[float, Callable[[], None], asyncio.TimerHandle]] = []

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(self.now + delay, callback, (), self._loop)
        self.timers.append((self.now + delay, callback, handle))
        return handle

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while due := [timer for timer in self.timers if timer[0] <= end and not timer[2].cancelled()]:
            first = min(due, key=lambda timer: timer[0])
            self.timers.remove(first)
            self.now = max(self.now, first[0])
            first[1]()
        self.now = end

    def close(self) -> None:
        self._loop.close()


def layer(number: int, current: int, status: str = "Downloading", total: int = 1000) -> PullProgress:
    return PullProgress(status=status, layer_id=f"{number:012x}", current_bytes=current, total_bytes=total)


@pytest.fixture
def clock() -> StepClock:
    made = StepClock()
    made.close()
    return made


def test_a_flood_becomes_a_steady_trickle_of_newest_states(clock: StepClock) -> None:
    told: list[tuple[float, PullProgress]] = []
    pacer = ProgressPacer(lambda progress: told.append((clock.now, progress)), clock=clock)
    for step in range(1000):
        pacer.hear(layer(step % 3, step))
        clock.advance(0.01)
    pacer.finish()
    times = [at for at, _ in told]
    assert len(told) <= 10.0 / INTERVAL_SECONDS + 4
    assert len(told) >= 0.8 * 10.0 / INTERVAL_SECONDS
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert min(gaps[:-3]) >= INTERVAL_SECONDS - 1e-6
    assert {progress.layer_id for _, progress in told[3:9]} == {f"{number:012x}" for number in range(3)}
    assert told[-1][1] == layer(999 % 3, 999)


def test_the_last_state_before_a_silence_is_told_without_another_line(clock: StepClock) -> None:
    told: list[PullProgress] = []
    pacer = ProgressPacer(told.append, clock=clock)
    pacer.hear(layer(1, 10))
    pacer.hear(layer(1, 20))
    pacer.hear(layer(1, 30))
    assert told == [layer(1, 10)]
    clock.advance(INTERVAL_SECONDS)
    assert told == [layer(1, 10), layer(1, 30)]
    clock.advance(60.0)
    assert len(told) == 2
    pacer.hear(layer(1, 30))
    pacer.finish()
    assert len(told) == 2, "nothing is told twice"


def test_all_layers_are_told_before_a_silence(clock: StepClock) -> None:
    told: list[PullProgress] = []
    pacer = ProgressPacer(told.append, clock=clock)
    lines = [layer(number, 10) for number in range(4)]
    for line in lines:
        pacer.hear(line)
    clock.advance(4 * INTERVAL_SECONDS)
    assert told == lines


def test_nothing_is_told_after_the_end(clock: StepClock) -> None:
    told: list[PullProgress] = []
    pacer = ProgressPacer(told.append, clock=clock)
    pacer.hear(layer(1, 10))
    pacer.hear(layer(1, 20))
    pacer.finish()
    assert told == [layer(1, 10), layer(1, 20)]
    pacer.hear(layer(1, 30))
    pacer.finish()
    clock.advance(60.0)
    assert len(told) == 2


def test_many_waiting_sandboxes_hear_less_often_and_no_burst_at_the_end(clock: StepClock) -> None:
    told: list[PullProgress] = []
    audience = 100
    pacer = ProgressPacer(told.append, audience=lambda: audience, clock=clock)
    for step in range(1000):
        pacer.hear(layer(step % 120, step))
        clock.advance(0.01)
    assert len(told) * audience <= 10.0 * MAX_EVENTS_PER_SECOND + audience
    before = len(told)
    pacer.finish()
    assert 1 <= (len(told) - before) * audience <= MAX_LAST_EVENTS
    assert told[-1] == layer(999 % 120, 999)


@pytest.mark.parametrize("identity", ["", "latest", "library/x", "1.36"])
def test_lines_about_no_layer_are_left_out(clock: StepClock, identity: str) -> None:
    told: list[PullProgress] = []
    pacer = ProgressPacer(told.append, clock=clock)
    pacer.hear(PullProgress(status="Pulling from library/x", layer_id=identity))
    pacer.finish()
    assert told == []


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9), st.floats(0.0, 0.5)), max_size=60))
def test_every_layer_ends_in_its_last_state(lines: list[tuple[int, int, float]]) -> None:
    clock = StepClock()
    clock.close()
    told: list[PullProgress] = []
    pacer = ProgressPacer(told.append, clock=clock)
    last: dict[str, PullProgress] = {}
    for number, current, pause in lines:
        progress = layer(number, current)
        last[progress.layer_id] = progress
        pacer.hear(progress)
        clock.advance(pause)
    pacer.finish()
    shown = {progress.layer_id: progress for progress in told}
    assert shown == last


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0B"),
        (1023, "1023B"),
        (1024, "1KB"),
        (2047, "1KB"),
        (1024**2 - 1, "1023KB"),
        (1024**2, "1MB"),
        (1024**3 - 1, "1023MB"),
        (1024**3, "1.0GB"),
        (1024**3 * 5 // 2, "2.5GB"),
    ],
)
def test_sizes_are_written_as_the_contract_has_them(count: int, text: str) -> None:
    assert byte_text(count) == text


@pytest.mark.parametrize(
    ("progress", "detail"),
    [
        (layer(10, 1024 * 7, total=3 * 1024**2), "Downloading 00000000000a (7KB/3MB)"),
        (PullProgress(status="Pull complete", layer_id="0" * 12), "Pull complete 000000000000"),
        (PullProgress(status="Extracting", layer_id="0" * 12, current_bytes=3), "Extracting 000000000000"),
    ],
)
def test_a_layers_event_can_be_drawn_as_a_bar(progress: PullProgress, detail: str) -> None:
    event = pulling_layer("s-1", now(), image="x:1", progress=progress)
    assert (event.reason, event.message) == ("PullingLayer", detail)
    assert event.metadata == {
        "openshell.progress.active_step": "pulling_image",
        "openshell.progress.active_detail": detail,
        "image_ref": "x:1",
        "docker_status": progress.status,
        "layer_id": progress.layer_id,
        "detail": detail,
    }
