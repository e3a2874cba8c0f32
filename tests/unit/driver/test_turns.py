"""Verbs, looks and refusals of the engine in any order and at any moment: what is told is so, and nothing is left over.

The launch itself is played: it makes and starts containers in the same steps as the real one, and may fail.
"""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from scripted.compute_gateway import launch_authentication
from scripted.memory_engine import MemoryDriver, memory_driver

from driver_docker import labels
from driver_docker.concurrency import together, uninterrupted
from driver_docker.engine import EngineAbsentError, EngineConflictError, EngineRefusedError, EngineTimeoutError
from driver_docker.engine_objects import ContainerStatus
from driver_docker.errors import DriverError, ProvisioningError
from driver_docker.events import ConditionStatus, Deleted, PlatformEvent, Snapshot
from driver_docker.exits import Exits
from driver_docker.lifecycle import Lifecycle
from driver_docker.observe import Observer
from driver_docker.records import RECORD_FILE
from driver_docker.sandbox_record import RecordPhase
from driver_docker.snapshots import READY
from driver_docker.turns import has_launch

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

    from driver_docker.events import WatchEvent
    from driver_docker.sandboxes import Sandbox

ID = "sb"
STEPS = 60
LONGEST_SECONDS = 60
"""After which verbs wait for each other rather than for a busy machine."""
LAUNCH = launch_authentication()


class Unsteady:
    """An engine in memory whose calls take a while, and sometimes fail."""

    def __init__(self, driver: MemoryDriver, chance: random.Random) -> None:
        self._driver = driver
        self.behind_backs: list[str] = []
        """What was made or started for no sandbox that has a launch."""
        self._engine = driver.engine
        self._chance = chance
        self._made = 0
        self.is_steady = False

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._engine, name)

        async def slow(*args: Any, **kwargs: Any) -> Any:
            await self.pause()
            if not self.is_steady and self._chance.random() < 0.04:
                raise self._chance.choice((EngineTimeoutError("no answer"), EngineRefusedError("not now")))
            if name.startswith(("stop", "remove")):
                return await uninterrupted(self._slowly(call(*args, **kwargs)))
            return await call(*args, **kwargs)

        return slow

    async def unpause_container(self, container: str) -> None:
        """Nothing is ever paused here."""
        raise EngineConflictError(f"{container} is not paused")

    async def pause(self, longest: int = 5) -> None:
        """A few steps of the loop."""
        for _ in range(self._chance.randrange(longest + 1)):
            await asyncio.sleep(0)

    async def _slowly(self, call: Coroutine[Any, Any, Any]) -> Any:
        await self.pause()
        return await call

    async def make(self, role: labels.Role) -> str:
        """Create a container; as on the real engine, it is there even if nobody waits for the answer any more."""

        async def create() -> str:
            await self.pause(20)
            self._made += 1
            name = f"{role.value}-{self._made}"
            self._check_launching(name)
            marks = self._driver.labels(ID) | {labels.ISOLATION_ROLE: role.value}
            self._engine.hold(name, labels=marks, status=ContainerStatus.CREATED)
            await self.pause()
            return name

        return await uninterrupted(create())

    def _check_launching(self, container: str) -> None:
        sandbox = self._driver.services.table.by_id(ID)
        if sandbox is None or not has_launch(sandbox):
            self.behind_backs.append(container)

    async def run(self, container: str) -> None:
        """Start a container."""

        async def start() -> None:
            await self.pause(20)
            if container not in self._engine.containers:
                raise EngineAbsentError("gone")
            self._check_launching(container)
            self._engine.change(container, status=ContainerStatus.RUNNING)
            await self.pause()

        await uninterrupted(start())


class Steps:
    """A disk whose writes take a few steps of the loop, so that the same order comes again with the same seed."""

    def __init__(self, engine: Unsteady) -> None:
        self._pause = engine.pause

    async def run(self, call: Callable[[], Any], *, to_the_end: bool = False) -> Any:
        async def work() -> Any:
            await self._pause()
            return call()

        return await uninterrupted(work())

    def close(self) -> None:
        """Nothing is open."""


class Played:
    """Launches and starts without documents and images."""

    def __init__(self, driver: MemoryDriver, engine: Unsteady, chance: random.Random) -> None:
        self._services = driver.services
        self._engine = engine
        self._chance = chance
        self.images = self.resources = SimpleNamespace(check=_nothing, recheck=_nothing)

    def _may_fail(self) -> None:
        if self._chance.random() < 0.1:
            raise ProvisioningError("it cannot be", reason="ContainerStartFailed")
        if not self._engine.is_steady and self._chance.random() < 0.2:
            raise EngineTimeoutError("no answer")

    async def _checked(self) -> None:
        """What goes on beside a creation, as of the other container or of the images, and may fail first."""
        await self._engine.pause()
        self._may_fail()

    async def _becomes_healthy(self) -> None:
        for _ in range(self._chance.randrange(4)):
            await self._engine.pause()
        self._may_fail()

    async def launch(self, sandbox: Sandbox, *_: Any) -> None:
        """As of a create."""
        workload, supervisor, _checked = await together(
            self._engine.make(labels.Role.SANDBOX), self._engine.make(_SUPERVISOR), self._checked()
        )
        sandbox.record = replace(sandbox.record, workload_id=workload, supervisor_id=supervisor)
        await self._services.save(sandbox)
        await self._engine.run(workload)
        await self._engine.run(supervisor)
        await self._becomes_healthy()

    async def run(self, sandbox: Sandbox) -> None:
        """As of a start."""
        if old := sandbox.record.supervisor_id:
            sandbox.record = replace(sandbox.record, supervisor_id="")
            await self._engine.remove_container(old)
        workload = sandbox.record.workload_id
        await together(self._checked(), uninterrupted(self._checked()))
        sandbox.begin_run(workload, stream=0)
        await self._engine.run(workload)
        supervisor = await self._engine.make(_SUPERVISOR)
        sandbox.record = replace(sandbox.record, supervisor_id=supervisor)
        await self._services.save(sandbox)
        await self._engine.run(supervisor)
        await self._becomes_healthy()
        sandbox.workload = await self._engine.inspect_container(workload)


_SUPERVISOR = labels.Role.SUPERVISOR


async def _nothing(*_: Any, **__: Any) -> Any:
    await asyncio.sleep(0)
    return SimpleNamespace(workspace_root="", check_fresh=lambda _: None)


def _played(driver: MemoryDriver, chance: random.Random) -> tuple[Unsteady, Observer]:
    engine = Unsteady(driver, chance)
    services: Any = driver.services
    services.engine = engine
    services.disk.close()
    services.disk = Steps(engine)
    services.config.backend_name = "b"
    services.gate = SimpleNamespace(admit_new=_nothing, admit_again=_nothing)
    exits = Exits(services, driver.background)
    played: Any = Played(driver, engine, chance)
    lifecycle = Lifecycle(services, played, exits, driver.background)
    relauncher: Any = lifecycle._starter._relauncher
    relauncher.run = played.run
    relauncher.read_committed = relauncher.read_retained = relauncher.rotate = _nothing
    return engine, Observer(services, lifecycle, exits, driver.background)


VERBS = ("create", "start", "stop", "delete", "look")
LIKELY = {None: (9, 0, 0, 1, 0), RecordPhase.FAILED: (6, 1, 1, 1, 2)}
OTHERWISE = (1, 6, 6, 1, 5)
"""How likely each verb is, by the phase: most come when they can do something."""


def _verb(driver: MemoryDriver, observer: Observer, chance: random.Random, number: int) -> Coroutine[Any, Any, Any]:
    lifecycle, sandbox = observer._lifecycle, driver.services.table.by_id(ID)
    request: Any = SimpleNamespace(sandbox_id=ID, name="n", workspace="w", image="i", launch=LAUNCH)
    weights = LIKELY.get(sandbox.record.phase if sandbox is not None else None, OTHERWISE)
    match chance.choices(VERBS, weights)[0]:
        case "create":
            return lifecycle.create(request)
        case "start":
            return lifecycle.start(sandbox_id=ID, name="", generation=f"g-{number}", launch=None)
        case "stop":
            return lifecycle.stop(sandbox_id=ID, name="")
        case "delete":
            return lifecycle.delete(sandbox_id=ID, name="")
    return observer.look_at_all()


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("seed", range(30))
async def test_whatever_verbs_meet_what_is_told_is_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)  # it would only take time
    chance = random.Random(seed)
    async with memory_driver(tmp_path) as driver:
        engine, observer = _played(driver, chance)
        lies: list[str] = []
        driver.services.publish = lambda event: _tell(driver, event, lies)
        asked = []
        for number in range(STEPS):
            asked.append(asyncio.create_task(_verb(driver, observer, chance, number)))
            for _ in range(chance.choice((0, 1, 6, 25, 80, 150))):
                await asyncio.sleep(0)
        async with asyncio.timeout(LONGEST_SECONDS):
            outcomes = await asyncio.gather(*asked, return_exceptions=True)
        for outcome in outcomes:
            assert outcome is None or isinstance(outcome, DriverError | bool), outcome
        engine.is_steady = True
        unexpected = [failure for failure in driver.failures if not isinstance(failure, DriverError)]
        assert unexpected == [], "only verbs whose refusal nobody waited for"
        driver.failures.clear()
        for _ in range(3):
            await driver.settle()
            await observer.look_at_all()
        await driver.settle()
        assert engine.behind_backs == []
        assert lies == []
        _check(driver)


def _tell(driver: MemoryDriver, event: WatchEvent, lies: list[str]) -> None:
    driver.told.append(event)
    statuses = [each.status for each in driver.engine.containers.values()]
    if isinstance(event, Deleted) and statuses:
        lies.append("deleted")
    if not isinstance(event, Snapshot):
        return
    ready = next(each for each in event.conditions if each.type == READY)
    if len(event.conditions) > 1 and (len(statuses) > 1 or any(status.is_alive for status in statuses)):
        lies.append("stopped")
    if ready.status is ConditionStatus.TRUE and statuses != [ContainerStatus.RUNNING] * 2:
        lies.append("ready")


def _check(driver: MemoryDriver) -> None:
    sandbox = driver.services.table.by_id(ID)
    containers = {each.container_id: each.status for each in driver.engine.containers.values()}
    if sandbox is None:
        assert containers == {}
        assert not (driver.services.store.directory / ID).exists()
        assert not driver.told or isinstance(driver.told[-1], Deleted)
        return
    record = sandbox.record
    assert sandbox.launch_task is None or sandbox.launch_task.done()
    written = json.loads((driver.services.store.directory / ID / RECORD_FILE).read_bytes())
    kept = (written["phase"], written["workload_id"], written["supervisor_id"])
    assert kept == (record.phase, record.workload_id, record.supervisor_id)
    if record.phase is RecordPhase.FAILED:
        assert containers == {}
    elif record.phase is RecordPhase.STOPPED:
        assert set(containers) == {record.workload_id}
        assert not containers[record.workload_id].is_alive
    else:
        assert record.phase is RecordPhase.ACTIVE
        if record.failure is None:
            running = dict.fromkeys((record.workload_id, record.supervisor_id), ContainerStatus.RUNNING)
            assert containers == running
        else:
            assert not any(status.is_alive for status in containers.values())
    assert not isinstance(driver.told[-1], Deleted)
    if record.failure is not None:
        warnings = [event.message for event in driver.told if isinstance(event, PlatformEvent)]
        assert record.failure.message in warnings
