"""How fast the Docker driver launches a sandbox and tells of a lost supervisor, against the bare engine.

Run as ``./dev bench driver``. The gateway and the driver are the real processes; the baselines are taken in the same
run, alternating with ours. Exits 1 when a ratio of medians is over its limit.

Create to both running
    From the CreateSandbox call on the driver's socket until an events reader has seen both containers start, against
    the same two containers, volumes, files and settings made with docker-py, one after the other.
Supervisor lost to watch event
    From SIGKILL of a Ready sandbox's supervisor until the driver's watch delivers the verdict, against the moment a
    bare events reader sees the ``die``.
Burst (``--only burst``)
    Many sandboxes asked for at once, against the same containers made by hand in as many threads: the time until all
    run, and each sandbox's own time from the creation of its workload until both of its containers run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import signal
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import docker
import docker.errors
import grpc
from rich.console import Console

from benchmarks import _burst, _by_hand
from benchmarks._launches import Signer, driver_sandbox, gateway_metadata
from benchmarks._observers import BareEvents, DriverWatch
from benchmarks._processes import gateway_and_driver
from benchmarks._statistics import Comparison, table
from openshell import OpenShell
from openshell.wire.compute.v1 import compute_driver_pb2 as pb
from openshell.wire.compute.v1 import compute_driver_pb2_grpc as rpc

if TYPE_CHECKING:
    from collections.abc import Callable

CREATE_LIMIT = 1.35
EXIT_LIMIT = 3.0
BURST_TOTAL_LIMIT = 1.1
BURST_EACH_LIMIT = 0.25
WARM_UP_ROUNDS = 1

_IMAGES = ("OPENSHELL_TEST_WORKLOAD_IMAGE", "OPENSHELL_TEST_RUNTIME_IMAGE", "OPENSHELL_TEST_SUPERVISOR_IMAGE")


@dataclass(frozen=True, slots=True)
class Bench:
    """Everything that the measurements use."""

    engine: docker.APIClient
    events: BareEvents
    driver: rpc.ComputeDriverStub
    watch: DriverWatch
    client: OpenShell
    image: str
    namespace: str
    signer: Signer

    def containers(self, sandbox_id: str) -> dict[str, str]:
        """The ids of a sandbox's containers by role."""
        wanted = {"label": [f"openshell.ai/sandbox-id={sandbox_id}", "openshell.ai/isolation-role"]}
        found = self.engine.containers(all=True, filters=wanted)
        return {each["Labels"]["openshell.ai/isolation-role"]: each["Id"] for each in found}


def create_through_driver(bench: Bench) -> tuple[float, _by_hand.Recipe]:
    """Create, wait for both starts, delete; the time in milliseconds and what was made."""
    sandbox_id = str(uuid.uuid4())
    launch = bench.signer.launch_authentication(sandbox_id)
    request = pb.CreateSandboxRequest(sandbox=driver_sandbox(sandbox_id, image=bench.image, launch=launch))
    bench.driver.GetCapabilities(pb.GetCapabilitiesRequest(gateway=gateway_metadata()))
    bench.events.forget()
    began = time.monotonic_ns()
    bench.driver.CreateSandbox(request)
    try:
        both = max(bench.events.wait_started(sandbox_id, role) for role in ("sandbox", "supervisor"))
        made = bench.containers(sandbox_id)
        recipe = _by_hand.Recipe.of(bench.engine, made["sandbox"], made["supervisor"], launch)
    finally:
        bench.driver.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=sandbox_id))
        bench.watch.wait_deleted(sandbox_id)
        bench.watch.forget()
    return _milliseconds(began, both), recipe


def create_by_hand(bench: Bench, recipe: _by_hand.Recipe) -> float:
    """The same two containers without a driver; the time in milliseconds."""
    made = _by_hand.Made()
    bench.events.forget()
    try:
        _by_hand.make(bench.engine, recipe, made)
        both = max(bench.events.wait_action("start", each) for each in (made.workload_id, made.supervisor_id))
    finally:
        _by_hand.unmake(bench.engine, made)
    return _milliseconds(made.began, both)


def lose_supervisor(bench: Bench) -> tuple[float, float]:
    """Bring a sandbox to Ready, kill its supervisor; milliseconds to the watch event and to the bare ``die``."""
    name = f"bench-{secrets.token_hex(4)}"
    sandbox = bench.client.sandboxes.create(name, image=bench.image, command=["/bin/sleep", "3600"])
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
    return _milliseconds(began, told), _milliseconds(began, died)


def _killer(engine: docker.APIClient, container: str) -> Callable[[], None]:
    """SIGKILL from the host where the engine's processes are visible, else through the engine."""
    pid = engine.inspect_container(container)["State"]["Pid"]
    with contextlib.suppress(OSError):
        if container in Path(f"/proc/{pid}/cgroup").read_text("utf-8"):
            return lambda: os.kill(pid, signal.SIGKILL)
    return lambda: engine.kill(container, signal="SIGKILL")


def _milliseconds(began: int, ended: int) -> float:
    return (ended - began) / 1e6


def measure_burst(bench: Bench, host: str, count: int, say: Callable[[str], None]) -> list[Comparison]:
    """Take the burst's two measures."""
    say("burst: warming up")
    _, recipe = create_through_driver(bench)
    say(f"burst: {count} sandboxes by hand")
    hand = _burst.by_hand(bench, host, recipe, count)
    say(f"burst: {count} sandboxes through the driver")
    ours = _burst.through_driver(bench, count)
    return [
        Comparison(
            name=f"{count} creates at once, until all run",
            baseline_name="by hand, unqueued",
            ours_milliseconds=(ours.total,),
            baseline_milliseconds=(hand.total,),
            limit=BURST_TOTAL_LIMIT,
        ),
        Comparison(
            name=f"{count} creates at once, each its own",
            baseline_name="by hand, unqueued",
            ours_milliseconds=ours.each,
            baseline_milliseconds=hand.each,
            limit=BURST_EACH_LIMIT,
        ),
    ]


def measure(bench: Bench, rounds: int, say: Callable[[str], None]) -> list[Comparison]:
    """Take the two measures of single sandboxes."""
    ours: list[float] = []
    by_hand: list[float] = []
    for number in range(-WARM_UP_ROUNDS, rounds):
        say(f"create to both running: {'warming up' if number < 0 else f'round {number + 1} of {rounds}'}")
        through_driver, recipe = create_through_driver(bench)
        hand_made = create_by_hand(bench, recipe)
        if number >= 0:
            ours.append(through_driver)
            by_hand.append(hand_made)
    told: list[float] = []
    died: list[float] = []
    for number in range(rounds):
        say(f"supervisor lost to watch event: round {number + 1} of {rounds}")
        to_watch, to_die = lose_supervisor(bench)
        told.append(to_watch)
        died.append(to_die)
    return [
        Comparison(
            name="create to both running",
            baseline_name="by hand, docker-py",
            ours_milliseconds=tuple(ours),
            baseline_milliseconds=tuple(by_hand),
            limit=CREATE_LIMIT,
        ),
        Comparison(
            name="supervisor SIGKILL to watch event",
            baseline_name="bare /events die",
            ours_milliseconds=tuple(told),
            baseline_milliseconds=tuple(died),
            limit=EXIT_LIMIT,
        ),
    ]


def run(rounds: int, say: Callable[[str], None], *, burst: int = 0) -> list[Comparison]:
    """Start everything, measure, and leave the engine as it was.

    Args:
        rounds: Samples of each measure of single sandboxes.
        say: Shows what is being done.
        burst: Measure a burst of so many sandboxes instead.
    """
    host = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    workload, runtime, supervisor = (os.environ[name] for name in _IMAGES)
    namespace = f"bench-{secrets.token_hex(4)}"
    engine = docker.APIClient(base_url=host, version="auto", timeout=120)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="openshell-bench-") as folder,
            gateway_and_driver(
                Path(folder), docker_host=host, namespace=namespace, workload=workload, runtime=runtime,
                supervisor=supervisor,
            ) as (endpoint, socket),
            grpc.insecure_channel(f"unix:{socket}") as channel,
            OpenShell(endpoint) as client,
            BareEvents(host) as events,
        ):  # fmt: skip
            driver = rpc.ComputeDriverStub(channel)
            with DriverWatch(driver) as watch:
                bench = Bench(engine, events, driver, watch, client, workload, namespace, Signer.make())
                return measure_burst(bench, host, burst, say) if burst else measure(bench, rounds, say)
    finally:
        _sweep(engine, namespace)
        engine.close()


def _sweep(engine: docker.APIClient, namespace: str) -> None:
    """Remove what an interrupted round left, of the driver's and of what was made by hand."""
    for prefix in ("openshell.ai/", _by_hand.LABEL_PREFIX):
        ours = {"label": f"{prefix}sandbox-namespace={namespace}"}
        for container in engine.containers(all=True, filters=ours):
            with contextlib.suppress(docker.errors.APIError):
                engine.remove_container(container["Id"], force=True, v=True)
        for volume in engine.volumes(filters=ours)["Volumes"] or ():
            with contextlib.suppress(docker.errors.APIError):
                engine.remove_volume(volume["Name"], force=True)


def main() -> int:
    """Run from the command line."""
    options = argparse.ArgumentParser(prog="./dev bench driver", description=(__doc__ or "").splitlines()[0])
    options.add_argument("-n", "--rounds", type=int, default=10, help="samples of each measure (default 10)")
    options.add_argument("--only", choices=["burst"], help="measure a burst of creates instead")
    options.add_argument("--burst-size", type=int, default=50, help="sandboxes of the burst (default 50)")
    options.add_argument("--json", action="store_true", help="print one JSON object on stdout instead of the table")
    chosen = options.parse_args()
    if chosen.rounds < 1 or chosen.burst_size < 1:
        options.error("--rounds and --burst-size must be at least 1")
    missing = [name for name in _IMAGES if not os.environ.get(name)]
    if missing:
        options.error(f"{', '.join(missing)} not set; run it as ./dev bench driver")
    progress = Console(stderr=True)
    with progress.status("starting the gateway and the driver") as status:
        comparisons = run(chosen.rounds, status.update, burst=chosen.burst_size if chosen.only == "burst" else 0)
    is_within = all(one.is_within for one in comparisons)
    if chosen.json:
        print(json.dumps({"within": is_within, "measures": [one.to_json() for one in comparisons]}))
    else:
        Console().print(table("driver against the bare engine, same run", comparisons))
    return 0 if is_within else 1


if __name__ == "__main__":
    sys.exit(main())
