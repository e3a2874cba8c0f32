"""Many sandboxes asked for at once: through the driver, and by hand with nothing that queues."""

from __future__ import annotations

import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from benchmarks import _by_hand, _create
from benchmarks._statistics import Comparison

if TYPE_CHECKING:
    from benchmarks._bench import Bench

TOTAL_LIMIT: Final = 1.1
EACH_LIMIT: Final = 0.25
_DELETERS: Final = 4


@dataclass(frozen=True, slots=True)
class Burst:
    """How long a burst took, in milliseconds."""

    total: float
    """From the first call until the last container runs."""
    each: tuple[float, ...]
    """For each sandbox, from the creation of its workload container until both containers run."""


def measure(bench: Bench, count: int, *, guests: str, is_judged: bool) -> list[Comparison]:
    """The same burst by hand and through the driver.

    Args:
        bench: What is measured with.
        count: Sandboxes of the burst.
        guests: What runs in the containers, for the names of the measures.
        is_judged: Whether the limits apply to what nothing queues; else that is only shown.
    """
    bench.say("burst: warming up")
    recipe = _create.warm_recipe(bench)
    bench.say(f"burst: {count} sandboxes by hand, one after the other")
    in_turn = one_after_the_other(bench, recipe, count)
    bench.say(f"burst: {count} sandboxes by hand, all at once")
    at_once = by_hand(bench, recipe, count)
    bench.say(f"burst: {count} sandboxes through the driver")
    ours = through_driver(bench, count)
    return [
        Comparison(
            name=f"{count} at once, {guests}, until all run",
            baseline_name="by hand, one after the other",
            ours=(ours.total,),
            baseline=(in_turn,),
            limit=TOTAL_LIMIT,
        ),
        Comparison(
            name=f"{count} at once, {guests}, until all run",
            baseline_name="by hand, unqueued",
            ours=(ours.total,),
            baseline=(at_once.total,),
            limit=TOTAL_LIMIT if is_judged else None,
        ),
        Comparison(
            name=f"{count} at once, {guests}, each its own",
            baseline_name="by hand, unqueued",
            ours=ours.each,
            baseline=at_once.each,
            limit=EACH_LIMIT if is_judged else None,
        ),
    ]


def through_driver(bench: Bench, count: int) -> Burst:
    """Ask the driver for all of them at once."""
    ids = [str(uuid.uuid4()) for _ in range(count)]
    requests = [bench.request(each) for each in ids]
    bench.shake_hands()
    bench.events.forget()
    began = time.monotonic_ns()
    try:
        for call in [bench.driver.CreateSandbox.future(request) for request in requests]:
            call.result()
        running = {
            each: max(bench.events.wait_started(each, role) for role in ("sandbox", "supervisor")) for each in ids
        }
        workloads = {each: bench.containers(each)["sandbox"] for each in ids}
        return _burst(bench, began, [(workloads[each], running[each]) for each in ids])
    finally:
        with ThreadPoolExecutor(_DELETERS) as pool:
            list(pool.map(bench.delete, ids))
        bench.watch.forget()


def one_after_the_other(bench: Bench, recipe: _by_hand.Recipe, count: int) -> float:
    """Make the same containers in one thread; the time in milliseconds until the last one runs."""
    made = [_by_hand.Made() for _ in range(count)]
    bench.events.forget()
    try:
        for each in made:
            _by_hand.make(bench.engine, recipe, each)
        return (bench.events.wait_action("start", made[-1].supervisor_id) - made[0].began) / 1e6
    finally:
        for each in made:
            _by_hand.unmake(bench.engine, each)


def by_hand(bench: Bench, recipe: _by_hand.Recipe, count: int) -> Burst:
    """Make the same containers, each sandbox in a thread of its own."""
    made = [_by_hand.Made() for _ in range(count)]
    clients = [bench.own_client() for _ in range(count)]
    bench.events.forget()
    try:
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(lambda pair: _by_hand.make(pair[0], recipe, pair[1]), zip(clients, made, strict=True)))
        ends = [
            (
                each.workload_id,
                max(bench.events.wait_action("start", one) for one in (each.workload_id, each.supervisor_id)),
            )
            for each in made
        ]
        return _burst(bench, min(each.began for each in made), ends)
    finally:
        with ThreadPoolExecutor(_DELETERS) as pool:
            list(pool.map(lambda pair: _by_hand.unmake(pair[0], pair[1]), zip(clients, made, strict=True)))
        for client in clients:
            client.close()


def _burst(bench: Bench, began: int, ends: list[tuple[str, int]]) -> Burst:
    each = tuple((end - bench.events.wait_action("create", workload)) / 1e6 for workload, end in ends)
    return Burst(total=(max(end for _, end in ends) - began) / 1e6, each=each)
