"""Many sandboxes asked for at once: through the driver, and by hand with nothing that queues."""

from __future__ import annotations

import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import docker

from benchmarks import _by_hand
from benchmarks._launches import driver_sandbox, gateway_metadata
from openshell.wire.compute.v1 import compute_driver_pb2 as pb

if TYPE_CHECKING:
    from benchmarks.driver import Bench

_DELETERS = 4


@dataclass(frozen=True, slots=True)
class Burst:
    """How long a burst took, in milliseconds."""

    total: float
    """From the first call until the last container runs."""
    each: tuple[float, ...]
    """For each sandbox, from the creation of its workload container until both containers run."""


def through_driver(bench: Bench, count: int) -> Burst:
    """Ask the driver for all of them at once."""
    ids = [str(uuid.uuid4()) for _ in range(count)]
    requests = [
        pb.CreateSandboxRequest(
            sandbox=driver_sandbox(each, image=bench.image, launch=bench.signer.launch_authentication(each))
        )
        for each in ids
    ]
    bench.driver.GetCapabilities(pb.GetCapabilitiesRequest(gateway=gateway_metadata()))
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
            list(pool.map(lambda each: bench.driver.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=each)), ids))
        bench.watch.forget()


def by_hand(bench: Bench, host: str, recipe: _by_hand.Recipe, count: int) -> Burst:
    """Make the same containers, each sandbox in a thread of its own."""
    made = [_by_hand.Made() for _ in range(count)]
    clients = [docker.APIClient(base_url=host, version="auto", timeout=120) for _ in range(count)]
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
