"""An engine of containers and volumes in memory, under the driver's own classes, without any Docker.

Answers can be refused, kept back, or made up, so that a test decides what is known when.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from driver_docker import labels
from driver_docker.concurrency import Background
from driver_docker.config import PublicDetail
from driver_docker.engine import EngineAbsentError, EngineConflictError
from driver_docker.engine_objects import (
    ContainerFacts,
    ContainerRow,
    ContainerStatus,
    EngineEvent,
    HealthStatus,
    VolumeFacts,
)
from driver_docker.exits import Exits
from driver_docker.lifecycle import Lifecycle
from driver_docker.observe import Observer
from driver_docker.records import RecordStore
from driver_docker.sandbox_record import RecordPhase, SandboxRecord
from driver_docker.sandboxes import SandboxTable
from driver_docker.services import Services

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Mapping
    from pathlib import Path

    from driver_docker.events import WatchEvent
    from driver_docker.sandboxes import Sandbox

AT = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)
NAMESPACE = "memory"
WORKLOAD, SUPERVISOR = "workload", "supervisor"


def engine_event(action: str, container: str, sandbox_id: str = "sb", **attributes: str) -> EngineEvent:
    """An event of a container, as the engine tells it."""
    attributes[labels.SANDBOX_ID] = sandbox_id
    return EngineEvent(kind="container", action=action, object_id=container, attributes=attributes, time=AT)


class MemoryStream:
    """An event stream that a test feeds; told nothing, it is as silent as one that is dead."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[EngineEvent] = asyncio.Queue()

    def tell(self, action: str, container: str, sandbox_id: str = "sb", **attributes: str) -> None:
        """Have an event of a container."""
        self._events.put_nowait(engine_event(action, container, sandbox_id, **attributes))

    async def __aiter__(self) -> AsyncIterator[EngineEvent]:
        while True:
            yield await self._events.get()

    async def close(self) -> None:
        """Nothing is open."""


class MemoryEngine:
    """What the driver asks of an engine when it observes, reclaims and tidies up."""

    def __init__(self) -> None:
        self.containers: dict[str, ContainerFacts] = {}
        self.volumes: dict[str, VolumeFacts] = {}
        self.calls: list[tuple[str, str]] = []
        """Every call: its name and what it was about."""
        self.refuse: Callable[[str, str], Exception | None] = lambda _call, _about: None
        """Asked before every call; an error that it returns is raised."""
        self.streams: list[MemoryStream] = []
        """Every event stream that was ever opened; the last one is the live one."""

    def hold(self, name: str, **facts: Any) -> None:
        """Have a container."""
        self.containers[name] = _facts(name, **facts)

    def change(self, name: str, **facts: Any) -> None:
        """Change a container."""
        self.containers[name] = replace(self.containers[name], **facts)

    def _called(self, call: str, about: str = "") -> None:
        self.calls.append((call, about))
        error = self.refuse(call, about)
        if error is not None:
            raise error

    def _found(self, container: str) -> ContainerFacts:
        if container not in self.containers:
            raise EngineAbsentError(f"No such container: {container}")
        return self.containers[container]

    async def ping(self) -> None:
        self._called("ping")

    async def inspect_container(self, container: str) -> ContainerFacts:
        self._called("inspect_container", container)
        return self._found(container)

    async def list_containers(self, wanted: Mapping[str, str]) -> tuple[ContainerRow, ...]:
        self._called("list_containers")
        return tuple(
            ContainerRow(
                container_id=each.container_id,
                name=each.name,
                image_id=each.image_id,
                labels=each.labels,
                status=each.status,
            )
            for each in self.containers.values()
            if wanted.items() <= each.labels.items()
        )

    async def list_volumes(self, wanted: Mapping[str, str]) -> tuple[VolumeFacts, ...]:
        self._called("list_volumes")
        return tuple(each for each in self.volumes.values() if wanted.items() <= each.labels.items())

    async def subscribe(self, *, kind: str, actions: Collection[str], labels: Mapping[str, str]) -> MemoryStream:
        self._called("subscribe")
        self.streams.append(MemoryStream())
        return self.streams[-1]

    async def log_tail(self, container: str, *, max_lines: int) -> bytes:
        self._called("log_tail", container)
        return b""

    async def stop_container(self, container: str, *, grace_seconds: int) -> None:
        self._called("stop_container", container)
        self._found(container)
        self.change(container, status=ContainerStatus.EXITED, exit_code=143, finished_at=AT)

    async def unpause_container(self, container: str) -> None:
        self._called("unpause_container", container)
        if self._found(container).status is not ContainerStatus.PAUSED:
            raise EngineConflictError(f"Container {container} is not paused")
        self.change(container, status=ContainerStatus.RUNNING)

    async def remove_container(self, container: str, *, force: bool = True) -> None:
        self._called("remove_container", container)
        del self.containers[self._found(container).container_id]

    async def remove_volume(self, name: str) -> None:
        self._called("remove_volume", name)
        if self.volumes.pop(name, None) is None:
            raise EngineAbsentError(f"No such volume: {name}")


def _facts(name: str, **facts: Any) -> ContainerFacts:
    plain = ContainerFacts(
        container_id=name,
        name=name,
        image_id="sha256:0",
        labels={},
        status=ContainerStatus.RUNNING,
        exit_code=0,
        oom_killed=False,
        error="",
        created_at=AT,
        started_at=AT,
        finished_at=None,
        network_mode="none",
        networks=(),
        health=HealthStatus.NONE,
        memory_limit_bytes=None,
        tty=False,
    )
    return replace(plain, **facts)


@dataclass
class MemoryDriver:
    """The driver's surroundings over an engine in memory and records on a disk."""

    engine: MemoryEngine
    services: Services
    background: Background
    told: list[WatchEvent] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)
    """What background tasks failed with; a test that expects one takes it out."""

    async def settle(self) -> None:
        """Wait until no background task is left."""
        while tasks := tuple(self.background._tasks):
            await asyncio.wait(tasks)

    def observer(self) -> Observer:
        """An observer of the engine, and the verbs behind it."""
        exits = Exits(self.services, self.background)
        launcher = cast("Any", SimpleNamespace())
        return Observer(
            self.services, Lifecycle(self.services, launcher, exits, self.background), exits, self.background
        )

    def hold(self, name: str, sandbox_id: str = "sb", **facts: Any) -> None:
        """Have a container of a sandbox."""
        self.engine.hold(name, labels=self.labels(sandbox_id), **facts)

    def hold_volume(self, name: str, sandbox_id: str = "sb") -> None:
        """Have a volume of a sandbox."""
        self.engine.volumes[name] = VolumeFacts(
            name=name, driver="local", labels=self.labels(sandbox_id), options={}, created_at=AT
        )

    def labels(self, sandbox_id: str) -> dict[str, str]:
        """This driver's labels of a sandbox."""
        return labels.owner_labels(self.services.owner) | {labels.SANDBOX_ID: sandbox_id}

    async def active(self, **changes: Any) -> Sandbox:
        """A sandbox that is ready, recorded, and whose containers run."""
        sandbox = self.services.table.add(replace(record(), **changes))
        await self.services.save(sandbox)
        for name in (WORKLOAD, SUPERVISOR):
            self.hold(name)
        return sandbox


def record(sandbox_id: str = "sb", phase: RecordPhase = RecordPhase.ACTIVE, **fields: Any) -> SandboxRecord:
    """A record of a sandbox with both containers."""
    return replace(
        SandboxRecord(
            sandbox_id=sandbox_id,
            name="n",
            workspace="w",
            phase=phase,
            changed_at=AT,
            generation="g-1",
            container_name="c",
            workload_id=WORKLOAD,
            supervisor_id=SUPERVISOR,
            was_ready=True,
        ),
        **fields,
    )


@asynccontextmanager
async def memory_driver(folder: Path) -> AsyncIterator[MemoryDriver]:
    """A driver's surroundings; its background tasks are awaited at the end, and must not have failed."""
    store = RecordStore(folder / "state" / NAMESPACE)
    owner = labels.Owner(namespace=NAMESPACE, driver=store.open())
    config = SimpleNamespace(
        public_detail=PublicDetail.LAST_LINE,
        stop_grace_seconds=1,
        supervisor_stop_grace_seconds=1,
        proxy_auth_file=None,
    )
    told: list[WatchEvent] = []
    failures: list[BaseException] = []
    services = Services(
        engine=cast("Any", MemoryEngine()),
        config=cast("Any", config),
        owner=owner,
        store=store,
        table=SandboxTable(),
        handshake=cast("Any", SimpleNamespace(older=False)),
        gate=cast("Any", SimpleNamespace()),
        publish=told.append,
    )
    background = Background(lambda _name, error: failures.append(error))
    try:
        yield MemoryDriver(cast("MemoryEngine", services.engine), services, background, told, failures)
        assert failures == []
    finally:
        await background.close()
        services.disk.close()
