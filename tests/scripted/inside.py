"""A driver in the test's own process: asked without a gateway between, and looked at from inside."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, TypeVar

from driver_docker.records import RECORD_FILE
from openshell.wire.compute.v1 import compute_driver_pb2 as pb
from scripted.compute_gateway import launch_authentication
from scripted.retained import stop, stopped
from scripted.scripted_engine import ScriptedEngine

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from pathlib import Path

    from driver_docker.engine import Engine
    from driver_docker.sandboxes import Sandbox
    from driver_docker.serve import Driver
    from scripted.compute_gateway import ComputeGateway
    from scripted.driver_bench import DriverBench

Result = TypeVar("Result")


class Wrap:
    """Puts a scripted engine between a driver and the real one."""

    engine: ScriptedEngine

    def __call__(self, engine: Engine) -> ScriptedEngine:
        """Remember the engine that the driver gets."""
        self.engine = ScriptedEngine(engine)
        return self.engine


async def begun(verb: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
    """A verb that has come as far as it gets without the engine or the disk."""
    task = asyncio.create_task(verb)
    for _ in range(20):
        await asyncio.sleep(0)
    return task


def entry_of(driver: Driver, sandbox_id: str) -> Sandbox:
    """The entry of a sandbox that is there."""
    sandbox = driver.services.table.by_id(sandbox_id)
    assert sandbox is not None
    return sandbox


async def launch_over(sandbox: Sandbox) -> None:
    """Until its launch has ended, if there ever was one, and what a failed one leaves to be done is done."""
    async with asyncio.timeout(30):
        if sandbox.launch_task is not None:
            await asyncio.wait([sandbox.launch_task])
        names = {f"clear {sandbox.sandbox_id}", f"finish {sandbox.sandbox_id}"}
        if following := [task for task in asyncio.all_tasks() if task.get_name() in names]:
            await asyncio.wait(following)


async def ask_create(link: ComputeGateway, wanted: pb.DriverSandbox) -> None:
    """Create a sandbox."""
    await link.stub.CreateSandbox(pb.CreateSandboxRequest(sandbox=wanted))


def ask_stop(driver: Driver, sandbox_id: str) -> Coroutine[Any, Any, None]:
    """Stop it without a gateway between."""
    return driver.lifecycle.stop(sandbox_id=sandbox_id, name="")


def ask_start(driver: Driver, sandbox_id: str, generation: str) -> Coroutine[Any, Any, None]:
    """Start it with new credentials, without a gateway between."""
    launch = launch_authentication(generation=generation)
    return driver.lifecycle.start(sandbox_id=sandbox_id, name="", generation=generation, launch=launch)


def is_after(link: ComputeGateway, seen: int, event: pb.WatchSandboxesEvent) -> bool:
    """Whether an event came after those seen so far."""
    return any(entry is event for _, entry in link.events[seen:])


def ask_delete(driver: Driver, sandbox_id: str) -> Coroutine[Any, Any, bool]:
    """Delete it without a gateway between."""
    return driver.lifecycle.delete(sandbox_id=sandbox_id, name="")


def recorded(bench: DriverBench, sandbox_id: str) -> str:
    """The phase that its record on disk says."""
    return str(json.loads((folder_of(bench, sandbox_id) / RECORD_FILE).read_bytes())["phase"])


def folder_of(bench: DriverBench, sandbox_id: str) -> Path:
    """Its state folder."""
    return bench.folder / "state" / bench.namespace / sandbox_id


def running_roles(bench: DriverBench, sandbox_id: str) -> list[str]:
    """What its running containers are for."""
    rows = bench.client.containers(filters={"label": f"openshell.ai/sandbox-id={sandbox_id}"})
    return [row["Labels"]["openshell.ai/isolation-role"] for row in rows]


async def is_stopped(bench: DriverBench, link: ComputeGateway, sandbox_id: str) -> bool:
    """Whether it is told as stopped, is stopped, and has no supervisor."""
    assert running_roles(bench, sandbox_id) == []
    assert len(bench.sandbox_left_over(sandbox_id)) == 3, "the workload and its two volumes"
    return await stopped(link, sandbox_id)


async def check_gone(bench: DriverBench, driver: Driver, link: ComputeGateway, sandbox_id: str) -> None:
    """Nothing of it is left, and its deletion was the last that was told of it."""
    await link.wait_deleted(sandbox_id)
    assert bench.sandbox_left_over(sandbox_id) == []
    assert not folder_of(bench, sandbox_id).exists()
    assert driver.services.table.by_id(sandbox_id) is None
    last = [e for _, e in link.events if sandbox_id in str(e)][-1]
    assert last.WhichOneof("payload") == "deleted", "nothing is told of a sandbox that is gone"


async def stopped_one(bench: DriverBench, link: ComputeGateway, name: str = "steady") -> pb.DriverSandbox:
    """A sandbox that was ready and has been stopped."""
    wanted = bench.sandbox(name)
    await bench.launch(link, wanted)
    await stop(link, wanted.id)
    return wanted
