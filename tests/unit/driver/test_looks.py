"""What a gateway's minutely round costs: one list, and no look at a sandbox that is as it is known to be."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest
from scripted.memory_engine import SUPERVISOR, WORKLOAD, engine_event, memory_driver

from driver_docker import lifecycle
from driver_docker.engine import (
    EngineAbsentError,
    EngineConflictError,
    EngineError,
    EngineRefusedError,
    EngineUnreachableError,
)
from driver_docker.engine_objects import ContainerStatus
from driver_docker.exits import Exits
from driver_docker.lifecycle import Lifecycle
from openshell.status import StatusCode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from scripted.memory_engine import MemoryDriver

    from driver_docker.sandboxes import Sandbox

pytestmark = pytest.mark.usefixtures("no_leaks")


class Round:
    """One sandbox, and what asking about it asks of the engine."""

    def __init__(self, driver: MemoryDriver, sandbox: Sandbox) -> None:
        self.driver = driver
        self.sandbox = sandbox
        self.verbs = Lifecycle(
            driver.services, cast("Any", None), Exits(driver.services, driver.background), driver.background
        )

    async def list(self) -> None:
        """As a gateway begins its round."""
        await self.verbs.list()
        self.driver.engine.calls.clear()

    async def asks(self) -> bool:
        """Whether the engine is asked when a gateway asks about the sandbox."""
        self.driver.engine.calls.clear()
        await self.verbs.get(sandbox_id=self.sandbox.sandbox_id, name="")
        return bool(self.driver.engine.calls)


@pytest.fixture
async def a_round(tmp_path: Any) -> AsyncIterator[Round]:
    async with memory_driver(tmp_path) as driver:
        sandbox = await driver.active()
        sandbox.workload = await driver.engine.inspect_container(WORKLOAD)
        driver.services.events_are_read = True
        yield Round(driver, sandbox)


async def test_a_sandbox_that_was_just_listed_as_known_is_not_looked_at_again(a_round: Round) -> None:
    assert await a_round.asks()
    await a_round.list()
    assert not await a_round.asks()
    assert not await a_round.asks()


async def test_a_list_is_one_call_to_the_engine(a_round: Round) -> None:
    a_round.driver.engine.calls.clear()
    await a_round.verbs.list()
    assert a_round.driver.engine.calls == [("list_containers", "")]


CHANGES: dict[str, Callable[[Round], object]] = {
    "the workload is paused": lambda it: it.driver.engine.change(WORKLOAD, status=ContainerStatus.PAUSED),
    "the supervisor is paused": lambda it: it.driver.engine.change(SUPERVISOR, status=ContainerStatus.PAUSED),
    "the supervisor has ended": lambda it: it.driver.engine.change(SUPERVISOR, status=ContainerStatus.DEAD),
    "the supervisor is gone": lambda it: it.driver.engine.containers.pop(SUPERVISOR),
    "nothing is known of the workload": lambda it: setattr(it.sandbox, "workload", None),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
async def test_a_sandbox_that_a_list_found_otherwise_is_looked_at(
    a_round: Round, change: Callable[[Round], object]
) -> None:
    change(a_round)
    await a_round.list()
    assert await a_round.asks()
    await a_round.driver.settle()


AFTERWARDS: dict[str, Callable[[Round], object]] = {
    "an event was told": lambda it: it.sandbox.add_event(engine_event("oom", WORKLOAD)),
    "it was started again": lambda it: it.sandbox.begin_run(WORKLOAD, stream=1),
    "it was found paused": lambda it: it.sandbox.note_supervisor(paused=True),
    "a late answer said something else": lambda it: setattr(
        it.sandbox, "workload", replace(it.driver.engine.containers[WORKLOAD], status=ContainerStatus.PAUSED)
    ),
    "events were lost and are read anew": lambda it: setattr(it.driver.services, "event_stream", 7),
    "events are not read any more": lambda it: setattr(it.driver.services, "events_are_read", False),
}


@pytest.mark.parametrize("change", AFTERWARDS.values(), ids=AFTERWARDS.keys())
async def test_what_happened_after_the_list_makes_the_next_question_one_to_the_engine(
    a_round: Round, change: Callable[[Round], object]
) -> None:
    await a_round.list()
    change(a_round)
    assert await a_round.asks()


@pytest.mark.parametrize("ended", [(WORKLOAD,), (WORKLOAD, SUPERVISOR)])
async def test_an_end_that_only_the_drivers_own_look_found_is_not_denied(
    a_round: Round, ended: tuple[str, ...]
) -> None:
    driver = a_round.driver
    await a_round.list()
    for container in ended:
        driver.engine.change(container, status=ContainerStatus.EXITED)
    observer = driver.observer()
    await observer.look_at_all()
    for _ in range(5):
        await asyncio.sleep(0)  # what it found is being handled
    assert not a_round.verbs._is_known(a_round.sandbox)
    await driver.background.close()


@pytest.mark.parametrize("error", [EngineAbsentError, EngineConflictError, EngineRefusedError, EngineError])
async def test_whatever_the_engine_answers_instead_of_its_list_makes_it_unavailable(
    a_round: Round, error: type[EngineError]
) -> None:
    a_round.driver.engine.refuse = lambda _call, _about: error("page not found")
    with pytest.raises(EngineUnreachableError, match="page not found") as failed:
        await a_round.verbs.list()
    assert (failed.value.status, failed.value.retryable) == (StatusCode.UNAVAILABLE, True)


async def test_a_list_does_not_count_for_long(a_round: Round, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "_KNOWN_SECONDS", -1.0)
    await a_round.list()
    assert await a_round.asks()


async def test_an_event_that_comes_while_the_list_is_on_its_way_outdates_it(a_round: Round) -> None:
    def tell(call: str, _about: str) -> None:
        if call == "list_containers":
            a_round.sandbox.add_event(engine_event("oom", WORKLOAD))

    a_round.driver.engine.refuse = tell
    await a_round.list()
    assert await a_round.asks()


async def test_a_list_fails_rather_than_tells_what_it_remembers_of_an_engine_that_is_away(a_round: Round) -> None:
    a_round.driver.engine.refuse = lambda _call, _about: EngineUnreachableError("the engine cannot be reached")
    with pytest.raises(EngineUnreachableError):
        await a_round.verbs.list()
