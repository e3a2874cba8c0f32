"""From a request until both containers run: through the driver, by hand, and as upstream's driver calls the engine."""

from __future__ import annotations

import os
import random
import time
import uuid
from functools import partial
from typing import TYPE_CHECKING, Final

from benchmarks import _by_hand, _upstream
from benchmarks._statistics import Comparison

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks._bench import Bench

BY_HAND_LIMIT: Final = 1.15
UPSTREAM_LIMIT: Final = 0.6


def measure(bench: Bench, rounds: int) -> list[Comparison]:
    """Take all in turns, so that all meet the same machine.

    Upstream's calls are replayed with a runtime as large as the one that the driver's sandboxes have, which makes the
    same sandbox, and, to be seen beside it, with one as large as upstream's own.
    """
    same_runtime = int(bench.engine.inspect_image(bench.images[1])["Size"])  # type: ignore[no-untyped-call]
    bench.say("create to both running: warming up")
    recipe = warm_recipe(bench)
    replay = partial(_upstream.make, bench.engine, recipe, bench.images)
    ways: tuple[Callable[[], float], ...] = (
        lambda: create_through_driver(bench)[0],
        lambda: _create(bench, partial(_by_hand.make, bench.engine, recipe)),
        lambda: _create(bench, partial(replay, runtime_bytes=same_runtime)),
        lambda: _create(bench, partial(replay, runtime_bytes=_upstream.PUBLISHED_BINARY_BYTES)),
    )
    samples: tuple[list[float], ...] = tuple([] for _ in ways)
    for number in range(rounds):
        bench.say(f"create to both running: round {number + 1} of {rounds}")
        # In another order each time, so that what one leaves the disk to do is not always the same one's trouble.
        for one in random.Random(number).sample(range(len(ways)), len(ways)):
            samples[one].append(ways[one]())
    ours, by_hand, upstream, upstream_own = samples
    return [
        Comparison(
            name="create to both running",
            baseline_name=baseline_name,
            ours=tuple(ours),
            baseline=tuple(baseline),
            limit=limit,
        )
        for baseline_name, baseline, limit in (
            ("by hand, docker-py", by_hand, BY_HAND_LIMIT),
            ("upstream's calls, this runtime", upstream, UPSTREAM_LIMIT),
            ("upstream's calls, its own runtime", upstream_own, None),
        )
    ]


def create_through_driver(bench: Bench) -> tuple[float, _by_hand.Recipe]:
    """Create, wait for both starts, delete; the time in milliseconds and what was made."""
    sandbox_id = str(uuid.uuid4())
    request = bench.request(sandbox_id)
    bench.shake_hands()
    settle()
    bench.events.forget()
    began = time.monotonic_ns()
    bench.driver.CreateSandbox(request)
    try:
        both = max(bench.events.wait_of(sandbox_id, role, "start") for role in ("sandbox", "supervisor"))
        made = bench.containers(sandbox_id)
        launch = bench.signer.launch_authentication(sandbox_id)
        recipe = _by_hand.Recipe.of(bench.engine, made["sandbox"], made["supervisor"], launch)
    finally:
        bench.delete(sandbox_id)
        bench.watch.forget()
    return (both - began) / 1e6, recipe


def _create(bench: Bench, make: Callable[[_by_hand.Made], None]) -> float:
    """Make two containers without a driver and remove them; the time in milliseconds."""
    made = _by_hand.Made()
    settle()
    bench.events.forget()
    try:
        make(made)
        both = max(bench.events.wait_action("start", each) for each in (made.workload_id, made.supervisor_id))
    finally:
        _by_hand.unmake(bench.engine, made)
    return (both - made.began) / 1e6


def settle() -> None:
    """Let the disk write down what earlier rounds left, so that no sample pays for another's."""
    os.sync()


def warm_recipe(bench: Bench) -> _by_hand.Recipe:
    """A recipe, after one launch that fills every cache."""
    return create_through_driver(bench)[1]
