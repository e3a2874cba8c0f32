"""How fast the Docker driver is and what it consumes, against the bare engine.

Run as ``./dev bench driver``. The gateway and the driver are the real processes; the baselines are taken in the same
run. Exits 1 when a limit is exceeded. ``--only`` chooses among the measures:

create
    From the CreateSandbox call on the driver's socket until an events reader has seen both containers start, against
    the same two containers, volumes, files and settings made with docker-py, one after the other; and against the
    engine calls of upstream's driver, replayed with docker-py.
loss
    From SIGKILL of a Ready sandbox's supervisor until the driver's watch delivers the verdict, against the moment a
    bare events reader sees the ``die``.
burst
    Many sandboxes asked for at once, against the same containers made by hand, one after the other and in as many
    threads: the time until all run, and each sandbox's own time from the creation of its workload until both of its
    containers run. Once with programs that do nothing, which measures driver and engine, and once with the real ones,
    whose own work slows down what queues behind them.
watches
    What the driver's process holds more after a thousand watches were opened and cancelled.
idle
    Many Ready sandboxes left alone: CPU time of driver and engine together against the engine's without the driver,
    and the driver's resident memory. Takes several minutes and about 60 MiB of memory a sandbox.
"""

from __future__ import annotations

import argparse
import enum
import json
import os
import sys
from typing import TYPE_CHECKING

from rich.console import Console

from benchmarks import _burst, _create, _idle, _loss, _watches
from benchmarks._bench import IMAGES, open_bench
from benchmarks._statistics import table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks._statistics import Measure


class Subject(enum.Enum):
    """What can be measured."""

    CREATE = "create"
    LOSS = "loss"
    BURST = "burst"
    WATCHES = "watches"
    IDLE = "idle"


def run(options: argparse.Namespace, say: Callable[[str], None]) -> list[Measure]:
    """Start everything, measure what was chosen, and leave the engine as it was.

    Args:
        options: The command line.
        say: Shows what is being done.
    """
    chosen: Sequence[Subject] = options.only or tuple(Subject)
    measures: list[Measure] = []
    if Subject.BURST in chosen:
        with open_bench(say, with_stand_ins=True) as bench:
            measures += _burst.measure(bench, options.burst_size, rounds=options.burst_rounds, is_idle=True)
    with open_bench(say) as bench:
        if Subject.BURST in chosen:
            measures += _burst.measure(bench, options.burst_size, rounds=1, is_idle=False)
        if Subject.CREATE in chosen:
            measures += _create.measure(bench, options.rounds)
        if Subject.LOSS in chosen:
            measures += _loss.measure(bench, options.rounds)
        if Subject.WATCHES in chosen:
            measures += _watches.measure(bench)
        if Subject.IDLE in chosen:  # last, for it stops the driver
            measures += _idle.measure(bench, options.idle_size)
    return measures


def main() -> int:
    """Run from the command line."""
    options = argparse.ArgumentParser(prog="./dev bench driver", description=(__doc__ or "").splitlines()[0])
    options.add_argument("-n", "--rounds", type=int, default=10, help="samples of create and loss (default 10)")
    options.add_argument(
        "--only",
        type=Subject,
        action="append",
        metavar="SUBJECT",
        help=f"measure this alone, may be repeated: {', '.join(each.value for each in Subject)}",
    )
    options.add_argument("--burst-size", type=int, default=50, help="sandboxes of the burst (default 50)")
    options.add_argument("--burst-rounds", type=int, default=3, help="bursts of idle programs (default 3)")
    options.add_argument("--idle-size", type=int, default=200, help="sandboxes left idle (default 200)")
    options.add_argument("--json", action="store_true", help="print one JSON object on stdout instead of the table")
    chosen = options.parse_args()
    if min(chosen.rounds, chosen.burst_size, chosen.burst_rounds, chosen.idle_size) < 1:
        options.error("--rounds, --burst-size, --burst-rounds and --idle-size must be at least 1")
    missing = [name for name in IMAGES if not os.environ.get(name)]
    if missing:
        options.error(f"{', '.join(missing)} not set; run it as ./dev bench driver")
    progress = Console(stderr=True)
    with progress.status("starting the gateway and the driver") as status:
        measures = run(chosen, status.update)
    is_within = all(one.is_within for one in measures)
    if chosen.json:
        print(json.dumps({"within": is_within, "measures": [one.to_json() for one in measures]}))
    else:
        Console().print(table("driver against the bare engine, same run", measures))
    return 0 if is_within else 1


if __name__ == "__main__":
    sys.exit(main())
