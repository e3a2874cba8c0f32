"""Many sandboxes asked for at once: through the driver, and by hand with nothing that queues."""

from __future__ import annotations

import secrets
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from benchmarks import _by_hand, _create
from benchmarks._statistics import Comparison
from openshell import Goal

if TYPE_CHECKING:
    from benchmarks._bench import Bench

TOTAL_LIMIT: Final = 1.1
EACH_LIMIT: Final = 0.25
_DELETERS: Final = 4
_DELETE_SECONDS: Final = 120.0


@dataclass(frozen=True, slots=True)
class Burst:
    """How long a burst took, in milliseconds."""

    total: float
    """From the first call until the last container runs."""
    each: tuple[float, ...]
    """For each sandbox, from the creation of its workload container until both containers run."""


def measure(bench: Bench, count: int, *, rounds: int, is_idle: bool) -> list[Comparison]:
    """The same bursts by hand and through the driver, in turn.

    Args:
        bench: What is measured with.
        count: Sandboxes of one burst.
        rounds: How many bursts of each kind.
        is_idle: Whether the containers' programs do nothing. Then the limits apply, and the driver is asked by itself.
            Real programs take more of the processor than all that launches them, and only the driver's come to life, in
            a gateway that knows them: those made by hand soon give up. So these are compared only to be seen.
    """
    guests = "idle" if is_idle else "real"
    bench.say("burst: warming up")
    recipe = _create.warm_recipe(bench)
    in_turn: list[float] = []
    at_once: list[Burst] = []
    ours: list[Burst] = []
    for number in range(rounds):
        prefix = f"burst of {count}, {guests}, round {number + 1} of {rounds}"
        bench.say(f"{prefix}: by hand, one after the other")
        in_turn.append(one_after_the_other(bench, recipe, count))
        bench.say(f"{prefix}: by hand, all at once")
        at_once.append(by_hand(bench, recipe, count))
        bench.say(f"{prefix}: through the driver")
        ours.append(through_driver(bench, count) if is_idle else through_gateway(bench, count))
    totals = tuple(burst.total for burst in ours)
    return [
        Comparison(
            name=f"{count} at once, {guests}, until all run",
            baseline_name="by hand, one after the other",
            ours=totals,
            baseline=tuple(in_turn),
            limit=TOTAL_LIMIT if is_idle else None,
        ),
        Comparison(
            name=f"{count} at once, {guests}, until all run",
            baseline_name="by hand, unqueued",
            ours=totals,
            baseline=tuple(burst.total for burst in at_once),
            limit=TOTAL_LIMIT if is_idle else None,
        ),
        Comparison(
            name=f"{count} at once, {guests}, each its own",
            baseline_name="by hand, unqueued",
            ours=tuple(one for burst in ours for one in burst.each),
            baseline=tuple(one for burst in at_once for one in burst.each),
            limit=EACH_LIMIT if is_idle else None,
        ),
    ]


def through_driver(bench: Bench, count: int) -> Burst:
    """Ask the driver for all of them at once."""
    ids = [str(uuid.uuid4()) for _ in range(count)]
    requests = [bench.request(each) for each in ids]
    bench.shake_hands()
    _create.settle()
    bench.events.forget()
    began = time.monotonic_ns()
    try:
        for call in [bench.driver.CreateSandbox.future(request) for request in requests]:
            call.result()
        return _burst(began, [_span(bench, each) for each in ids])
    finally:
        with ThreadPoolExecutor(_DELETERS) as pool:
            list(pool.map(bench.delete, ids))
        bench.watch.forget()


def through_gateway(bench: Bench, count: int) -> Burst:
    """Ask a gateway, which asks the driver, for all of them at once."""
    names = [f"burst-{secrets.token_hex(4)}" for _ in range(count)]
    made: list[str] = []
    _create.settle()
    bench.events.forget()
    began = time.monotonic_ns()

    def create(name: str) -> str:
        sandbox = bench.client.sandboxes.create(name, image=bench.images[0], command=["/bin/sleep", "3600"])
        made.append(name)
        return sandbox.metadata.id if sandbox.metadata else ""

    def delete(name: str) -> None:
        bench.client.sandboxes.delete(name)
        bench.client.sandboxes.wait(name, Goal.DELETED, timeout_seconds=_DELETE_SECONDS)

    try:
        with ThreadPoolExecutor(count) as pool:
            ids = list(pool.map(create, names))
        return _burst(began, [_span(bench, each) for each in ids])
    finally:
        with ThreadPoolExecutor(_DELETERS) as pool:
            list(pool.map(delete, made))
        bench.watch.forget()


def one_after_the_other(bench: Bench, recipe: _by_hand.Recipe, count: int) -> float:
    """Make the same containers in one thread; the time in milliseconds until the last one runs."""
    made = [_by_hand.Made() for _ in range(count)]
    _create.settle()
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
    _create.settle()
    bench.events.forget()
    try:
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(lambda pair: _by_hand.make(pair[0], recipe, pair[1]), zip(clients, made, strict=True)))
        spans = [
            (
                bench.events.wait_action("create", each.workload_id),
                max(bench.events.wait_action("start", one) for one in (each.workload_id, each.supervisor_id)),
            )
            for each in made
        ]
        return _burst(min(each.began for each in made), spans)
    finally:
        with ThreadPoolExecutor(_DELETERS) as pool:
            list(pool.map(lambda pair: _by_hand.unmake(pair[0], pair[1]), zip(clients, made, strict=True)))
        for client in clients:
            client.close()


def _span(bench: Bench, sandbox_id: str) -> tuple[int, int]:
    """When the workload of one of the driver's sandboxes was created, and when both its containers ran."""
    return (
        bench.events.wait_of(sandbox_id, "sandbox", "create"),
        max(bench.events.wait_of(sandbox_id, role, "start") for role in ("sandbox", "supervisor")),
    )


def _burst(began: int, spans: list[tuple[int, int]]) -> Burst:
    each = tuple((end - created) / 1e6 for created, end in spans)
    return Burst(total=(max(end for _, end in spans) - began) / 1e6, each=each)
