"""Many idle sandboxes: what driver and engine consume together, against the engine alone with the same containers."""

from __future__ import annotations

import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from benchmarks._consumption import Footprint, cpu_seconds, engine_processes
from benchmarks._statistics import Bound, Comparison, Measure

if TYPE_CHECKING:
    from benchmarks._bench import Bench

CPU_LIMIT: Final = 1.2
RESIDENT_LIMIT_MEBIBYTES: Final = 150.0
_CREATORS: Final = 4
_READY_SECONDS: Final = 300.0
_SETTLE_SECONDS: Final = 20.0
_WINDOW_SECONDS: Final = 130.0
"""Longer than two of the driver's looks at everything, so that their cost is in it."""


def measure(bench: Bench, count: int) -> list[Measure]:
    """Bring up so many sandboxes and leave them alone; the driver is stopped for the baseline and not started again."""
    names = [f"idle-{secrets.token_hex(4)}" for _ in range(count)]
    done = 0

    def bring_up(name: str) -> None:
        nonlocal done
        bench.client.sandboxes.create(name, image=bench.images[0], command=["/bin/sleep", "86400"])
        bench.client.sandboxes.wait(name, timeout_seconds=_READY_SECONDS)
        done += 1
        bench.say(f"idle: {done} of {count} sandboxes ready")

    with ThreadPoolExecutor(_CREATORS) as pool:
        list(pool.map(bring_up, names))
    engine = engine_processes(bench.host, {each["Id"] for each in bench.engine.containers(quiet=True)})
    bench.say("idle: settling")
    time.sleep(_SETTLE_SECONDS)
    bench.say(f"idle: {_WINDOW_SECONDS:g} s with the driver")
    together = _spent((*engine, bench.process.pid))
    resident = Footprint.of(bench.process.pid).resident_bytes
    bench.process.stop()
    time.sleep(_SETTLE_SECONDS)
    bench.say(f"idle: {_WINDOW_SECONDS:g} s without the driver")
    alone = _spent(engine)
    return [
        Comparison(
            name=f"{count} idle, CPU in {_WINDOW_SECONDS:g} s",
            baseline_name="engine alone",
            ours=(together,),
            baseline=(alone,),
            limit=CPU_LIMIT,
            unit="s",
        ),
        Bound(
            name=f"{count} idle, driver's resident memory",
            value=resident / (1 << 20),
            limit=RESIDENT_LIMIT_MEBIBYTES,
            unit="MiB",
        ),
    ]


def _spent(pids: tuple[int, ...]) -> float:
    before = cpu_seconds(pids)
    time.sleep(_WINDOW_SECONDS)
    return cpu_seconds(pids) - before
