"""A supervisor is killed: how long until the driver's watch tells why."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks._statistics import Comparison

if TYPE_CHECKING:
    from collections.abc import Callable

    import docker

    from benchmarks._bench import Bench

LIMIT: Final = 2.0
LIMIT_P95: Final = 3.0


def measure(bench: Bench, rounds: int) -> list[Comparison]:
    """Kill one supervisor after the other."""
    told: list[float] = []
    died: list[float] = []
    for number in range(rounds):
        bench.say(f"supervisor lost to watch event: round {number + 1} of {rounds}")
        to_watch, to_die = lose_supervisor(bench)
        told.append(to_watch)
        died.append(to_die)
    return [
        Comparison(
            name="supervisor SIGKILL to watch event",
            baseline_name="bare /events die",
            ours=tuple(told),
            baseline=tuple(died),
            limit=LIMIT,
            limit_p95=LIMIT_P95,
        )
    ]


def lose_supervisor(bench: Bench) -> tuple[float, float]:
    """Bring a sandbox to Ready, kill its supervisor; milliseconds to the watch event and to the bare ``die``."""
    name = f"bench-{secrets.token_hex(4)}"
    sandbox = bench.client.sandboxes.create(name, image=bench.images[0], command=["/bin/sleep", "3600"])
    try:
        bench.client.sandboxes.wait(name, timeout_seconds=120)
        if sandbox.metadata is None:
            raise RuntimeError("the gateway returned a sandbox without metadata")
        sandbox_id = sandbox.metadata.id
        bench.watch.wait_ready(sandbox_id)
        supervisor = bench.containers(sandbox_id)["supervisor"]
        kill = _killer(bench.engine, supervisor)
        bench.events.forget()
        began = time.monotonic_ns()
        kill()
        died = bench.events.wait_action("die", supervisor)
        told = bench.watch.wait_killed(sandbox_id)
    finally:
        bench.client.sandboxes.delete(name)
        with contextlib.suppress(TimeoutError):
            bench.watch.wait_deleted(sandbox.metadata.id if sandbox.metadata else "")
        bench.watch.forget()
    return (told - began) / 1e6, (died - began) / 1e6


def _killer(engine: docker.APIClient, container: str) -> Callable[[], None]:
    """SIGKILL from the host where the engine's processes are visible, else through the engine."""
    pid = engine.inspect_container(container)["State"]["Pid"]
    with contextlib.suppress(OSError):
        if container in Path(f"/proc/{pid}/cgroup").read_text("utf-8"):
            return lambda: os.kill(pid, signal.SIGKILL)
    return lambda: engine.kill(container, signal="SIGKILL")
