"""Verbs beside real launches over an engine in memory: each comes to its end, whatever the launch is at."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from scripted.compute_gateway import sandbox
from scripted.launching_engine import USER_IMAGE, launching

from driver_docker import labels
from driver_docker.concurrency import uninterrupted
from driver_docker.engine import EngineRefusedError
from driver_docker.exits import Exits
from driver_docker.lifecycle import Lifecycle
from driver_docker.requests import decode_sandbox

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from scripted.memory_engine import MemoryDriver

    from driver_docker.engine_objects import ContainerSpec
    from driver_docker.requests import LaunchRequest
    from driver_docker.sandboxes import Sandbox

pytestmark = pytest.mark.usefixtures("no_leaks")

HANGS_SECONDS = 10
"""What takes so long waits for something that never comes."""


@asynccontextmanager
async def living(folder: Path) -> AsyncIterator[tuple[MemoryDriver, Lifecycle]]:
    """A driver whose creates are not validated before."""
    async with launching(folder) as (driver, launcher):
        lifecycle = Lifecycle(driver.services, launcher, Exits(driver.services, driver.background), driver.background)
        made: Any = lifecycle
        made.validate = _nothing
        made._engine.ping = _nothing
        yield driver, lifecycle


async def _nothing(*_: Any) -> None:
    pass


def _request() -> LaunchRequest:
    return decode_sandbox(sandbox(USER_IMAGE), namespace="default", allow_driver_config=False)


async def _create(driver: MemoryDriver, lifecycle: Lifecycle) -> Sandbox:
    request = _request()
    await lifecycle.create(request)
    entry = driver.services.table.by_id(request.sandbox_id)
    assert entry is not None
    return entry


@pytest.mark.parametrize("verb", ["stop", "delete", "abandon_launches"])
async def test_a_verb_ends_a_launch_that_is_just_failing(tmp_path: Path, verb: str) -> None:
    async with living(tmp_path) as (driver, lifecycle):
        original = driver.engine.create_container  # type: ignore[attr-defined]
        refused, answered = asyncio.Event(), asyncio.Event()

        async def create(spec: ContainerSpec) -> Any:
            role = spec.labels.get(labels.ISOLATION_ROLE)
            if role == labels.Role.SANDBOX:
                refused.set()
                raise EngineRefusedError("no such device")
            if role == labels.Role.SUPERVISOR:
                await uninterrupted(answered.wait())  # a create is awaited to its end
            return await original(spec)

        driver.engine.create_container = create  # type: ignore[attr-defined]
        entry = await _create(driver, lifecycle)
        await refused.wait()
        call = (
            lifecycle.abandon_launches()
            if verb == "abandon_launches"
            else getattr(lifecycle, verb)(sandbox_id=entry.sandbox_id, name="")
        )
        called = asyncio.create_task(call)
        for _ in range(5):
            await asyncio.sleep(0)  # it has its turn
        answered.set()
        await asyncio.wait_for(called, HANGS_SECONDS)
        await driver.settle()
        assert [each.name for each in driver.engine.containers.values() if not each.name.endswith("-fill")] == []
