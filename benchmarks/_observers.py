"""Two readers in threads that note when something was seen: the engine's bare events, and the driver's watch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import docker
import grpc

from openshell.wire.compute.v1 import compute_driver_pb2 as pb
from openshell.wire.compute.v1 import compute_driver_pb2_grpc as rpc

if TYPE_CHECKING:
    from collections.abc import Iterator

_SEEN_SECONDS = 120.0

Item = TypeVar("Item")
EngineEvent = dict[str, Any]


class _Seen(Generic[Item]):
    """What a thread saw, each with the moment at which it arrived here."""

    def __init__(self, name: str) -> None:
        self._items: list[tuple[int, Item]] = []
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def wait(self, wanted: Callable[[Item], bool]) -> int:
        """Wait until something fits, and return when it arrived, in nanoseconds of the monotonic clock."""
        deadline = time.monotonic() + _SEEN_SECONDS
        looked = 0
        with self._changed:
            while True:
                for moment, item in self._items[looked:]:
                    if wanted(item):
                        return moment
                looked = len(self._items)
                if self._error is not None:
                    raise RuntimeError(f"{self._thread.name} ended: {self._error}")
                if not self._changed.wait(deadline - time.monotonic()):
                    raise TimeoutError(f"{self._thread.name} did not see it within {_SEEN_SECONDS:g} s")

    def forget(self) -> None:
        """Drop what was seen so far."""
        with self._changed:
            self._items.clear()

    def _run(self) -> None:
        try:
            for item in self._source():
                moment = time.monotonic_ns()
                with self._changed:
                    self._items.append((moment, item))
                    self._changed.notify_all()
        except Exception as error:
            if not self._closing:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()

    def _source(self) -> Iterator[Item]:
        raise NotImplementedError

    def _end(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._closing = True
        self._end()
        self._thread.join(_SEEN_SECONDS)


class BareEvents(_Seen[EngineEvent]):
    """A reader of the engine's event stream and nothing else: the least that anybody needs to notice something."""

    def __init__(self, docker_host: str) -> None:
        super().__init__("events reader")
        self._client = docker.APIClient(base_url=docker_host, version="auto")
        # Opened here, so that nothing that happens after construction is missed.
        self._stream = self._client.events(decode=True, filters={"type": "container"})

    def _source(self) -> Iterator[EngineEvent]:
        return iter(self._stream)

    def _end(self) -> None:
        self._stream.close()
        self._client.close()

    def wait_action(self, action: str, container_id: str) -> int:
        """Wait for one action of one container."""
        return self.wait(lambda event: event.get("Action") == action and event["Actor"]["ID"] == container_id)

    def wait_of(self, sandbox_id: str, role: str, action: str) -> int:
        """Wait for one action of a sandbox's container of one role."""

        def wanted(event: EngineEvent) -> bool:
            attributes = event["Actor"]["Attributes"]
            return (
                event.get("Action") == action
                and attributes.get("openshell.ai/sandbox-id") == sandbox_id
                and attributes.get("openshell.ai/isolation-role") == role
            )

        return self.wait(wanted)


class DriverWatch(_Seen[pb.WatchSandboxesEvent]):
    """A reader of the driver's watch, as a gateway opens it."""

    def __init__(self, stub: rpc.ComputeDriverStub) -> None:
        super().__init__("watch reader")
        self._call = stub.WatchSandboxes(pb.WatchSandboxesRequest())

    def _source(self) -> Iterator[pb.WatchSandboxesEvent]:
        try:
            yield from self._call
        except grpc.RpcError:
            if not self._closing:
                raise

    def _end(self) -> None:
        self._call.cancel()

    def wait_ready(self, sandbox_id: str) -> int:
        """Wait until the driver itself calls a sandbox ready; a gateway may do so a moment earlier."""
        return self.wait(
            lambda event: (
                event.sandbox.sandbox.id == sandbox_id
                and any(
                    condition.type == "Ready" and condition.status == "True"
                    for condition in event.sandbox.sandbox.status.conditions
                )
            )
        )

    def wait_killed(self, sandbox_id: str) -> int:
        """Wait for the event that carries the verdict on a sandbox's supervisor, which must be that of a SIGKILL."""

        def wanted(event: pb.WatchSandboxesEvent) -> bool:
            told = event.platform_event
            metadata = told.event.metadata
            if told.sandbox_id != sandbox_id or metadata.get("openshell.verdict.component") != "supervisor":
                return False
            if metadata.get("openshell.verdict.signal") != "SIGKILL":
                raise RuntimeError(f"the driver's verdict on a killed supervisor is wrong: {dict(metadata)}")
            return True

        return self.wait(wanted)

    def wait_deleted(self, sandbox_id: str) -> int:
        """Wait for the end of a sandbox."""
        return self.wait(lambda event: event.deleted.sandbox_id == sandbox_id)
