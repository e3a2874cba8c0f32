"""Watches that come and go: what the driver's process holds afterwards that it did not hold before."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Final

from benchmarks._consumption import Footprint
from benchmarks._statistics import Bound
from openshell.wire.compute.v1 import compute_driver_pb2 as pb

if TYPE_CHECKING:
    from benchmarks._bench import Bench

COUNT: Final = 1000
_WARM_UP_COUNT: Final = 300
"""Until here allocators and pools reach their size."""
_SETTLE_SECONDS: Final = 3.0
RESIDENT_LIMIT_KIBIBYTES: Final = 1024.0
"""One KiB for each watch: less than any of them holds while it is open, and above what allocators vary by."""


def measure(bench: Bench) -> list[Bound]:
    """Open and cancel watches, each after the first thing it was told."""
    sandbox_id = str(uuid.uuid4())
    bench.shake_hands()
    bench.driver.CreateSandbox(bench.request(sandbox_id))
    try:
        _open_and_cancel(bench, _WARM_UP_COUNT)
        before = _settled(bench)
        _open_and_cancel(bench, COUNT)
        after = _settled(bench)
    finally:
        bench.delete(sandbox_id)
        bench.watch.forget()
    name = f"{COUNT} watches, growth of"
    return [
        Bound(name=f"{name} threads", value=after.threads - before.threads, limit=0, unit=""),
        Bound(name=f"{name} descriptors", value=after.descriptors - before.descriptors, limit=0, unit=""),
        Bound(
            name=f"{name} resident memory",
            value=(after.resident_bytes - before.resident_bytes) / 1024,
            limit=RESIDENT_LIMIT_KIBIBYTES,
            unit="KiB",
        ),
    ]


def _open_and_cancel(bench: Bench, count: int) -> None:
    for number in range(count):
        if number % 100 == 0:
            bench.say(f"watches: {number} of {count}")
        call = bench.driver.WatchSandboxes(pb.WatchSandboxesRequest())
        next(iter(call))
        call.cancel()


def _settled(bench: Bench) -> Footprint:
    time.sleep(_SETTLE_SECONDS)
    return Footprint.of(bench.process.pid)
