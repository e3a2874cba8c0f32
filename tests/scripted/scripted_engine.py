"""The real engine with a hand on its answers: they can be kept back or made up, as can a container's state."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from driver_docker.engine import Engine, EventStream
    from driver_docker.engine_objects import ContainerFacts, ContainerStatus, EngineEvent


@dataclass(eq=False)
class Fault:
    """Calls of one method that fail without reaching the engine."""

    method: str
    error: Exception
    container: str
    calls: int
    """How many calls fail; later ones pass."""


@dataclass(eq=False)
class Hold:
    """Calls of one method whose answers, or whose beginning, are kept back."""

    method: str
    before: bool
    container: str
    calls: int
    """How many calls are kept back; later ones pass."""
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    _open: asyncio.Event = field(default_factory=asyncio.Event)

    def release(self) -> None:
        """Let every call go on."""
        self._open.set()

    async def wait(self) -> None:
        """Stand in the way of a call."""
        self.reached.set()
        await self._open.wait()


class ScriptedEngine:
    """Hands every call to the real engine; what a test holds back arrives late."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._holds: list[Hold] = []
        self._faults: list[Fault] = []
        self.states: dict[str, ContainerStatus] = {}
        """Made-up states by container id."""
        self.events_held = False
        self._events: list[EngineEvent] = []
        self._more = asyncio.Event()
        self.subscriptions = 0

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._engine, name)
        if not callable(attribute) or name.startswith("_"):
            return attribute

        async def call(*args: Any, **kwargs: Any) -> Any:
            hold = next((each for each in self._holds if each.method == name and self._meant(each, args)), None)
            if hold is not None:
                hold.calls -= 1
            if hold is not None and hold.before:
                await hold.wait()
            fault = next((each for each in self._faults if each.method == name and self._meant(each, args)), None)
            if fault is not None:
                fault.calls -= 1
                raise fault.error
            answer = await attribute(*args, **kwargs)
            if hold is not None and not hold.before:
                await hold.wait()
            return answer

        return call

    @staticmethod
    def _meant(script: Hold | Fault, args: tuple[Any, ...]) -> bool:
        return script.calls > 0 and (not script.container or (bool(args) and args[0] == script.container))

    @contextmanager
    def hold(self, method: str, *, before: bool = False, container: str = "", calls: int = 1_000) -> Iterator[Hold]:
        """Keep back the answers of a method, or with `before` the calls themselves, until released or left."""
        hold = Hold(method, before, container, calls)
        self._holds.append(hold)
        try:
            yield hold
        finally:
            self._holds.remove(hold)
            hold.release()

    @contextmanager
    def failing(self, method: str, error: Exception, *, container: str = "", calls: int = 1_000) -> Iterator[Fault]:
        """Have the calls of a method fail until left."""
        fault = Fault(method, error, container, calls)
        self._faults.append(fault)
        try:
            yield fault
        finally:
            self._faults.remove(fault)

    async def inspect_container(self, container: str) -> ContainerFacts:
        """Look, wait where a test says so, and put in the made-up state."""
        facts = cast("ContainerFacts", await self.__getattr__("inspect_container")(container))
        state = self.states.get(facts.container_id)
        return facts if state is None else replace(facts, status=state)

    async def subscribe(self, **wanted: Any) -> EventStream:
        """Subscribe to the real events, which pass while they are not held."""
        self.subscriptions += 1
        return cast("EventStream", _HeldStream(self, await self._engine.subscribe(**wanted)))

    async def events_passing(self) -> None:
        """Wait until events may pass."""
        while self.events_held:
            await self._more.wait()

    def release_events(self) -> None:
        """Let the events pass, those that came meanwhile first."""
        self.events_held = False
        self._more.set()
        self._more = asyncio.Event()


class _HeldStream:
    def __init__(self, owner: ScriptedEngine, stream: EventStream) -> None:
        self._owner, self._stream = owner, stream

    async def __aiter__(self) -> AsyncIterator[EngineEvent]:
        async for event in self._stream:
            await self._owner.events_passing()
            yield event

    async def close(self) -> None:
        await self._stream.close()
