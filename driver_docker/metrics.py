"""Prometheus metrics with fixed label sets, served on a loopback port where one is configured.

Every label value comes from a set that this code knows: methods of the contract, gRPC codes, calls of the `Engine`
protocol, kinds of verdicts, phases. What a peer or an engine sends never becomes a label.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, start_http_server
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from driver_docker.engine import (
    EngineAbsentError,
    EngineConflictError,
    EngineError,
    EngineIncompatibleError,
    EngineRefusedError,
    EngineTimeoutError,
    EngineUnreachableError,
)
from driver_docker.errors import ConfigurationError
from driver_docker.events import ConditionStatus, Deleted, Snapshot
from driver_docker.sandbox_record import ENDED, RecordPhase
from driver_docker.snapshots import READY
from driver_docker.verdict import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from driver_docker.events import WatchEvent
    from driver_docker.sandboxes import SandboxTable
    from driver_docker.watch import WatchHub
    from openshell.verdicts import Verdict

LOOPBACK: Final = "127.0.0.1"
PREFIX: Final = "openshell_driver_"
SCHEDULED: Final = "Scheduled"
STARTED: Final = "Started"
OTHER_METHOD: Final = "other"
_RPC_SECONDS: Final = (0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10.0, 60.0)
_ENGINE_SECONDS: Final = (0.005, 0.025, 0.1, 0.25, 1.0, 2.5, 10.0, 60.0)
_LAUNCH_SECONDS: Final = (0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_RESULTS: Final[tuple[tuple[type[Exception], str], ...]] = (
    (EngineAbsentError, "absent"),
    (EngineConflictError, "conflict"),
    (EngineRefusedError, "refused"),
    (EngineTimeoutError, "timeout"),
    (EngineUnreachableError, "unreachable"),
    (EngineIncompatibleError, "incompatible"),
    (EngineError, "error"),
)


class Metrics:
    """All counters of one driver, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self.registry)
        self._reading = False
        self.rpcs = self._counter("rpcs", "RPCs that ended.", "method", "status")
        self.rpc_seconds = self._histogram("rpc_seconds", "How long unary RPCs took.", _RPC_SECONDS, "method")
        self.launches = self._counter("launches", "Launches and starts that ended.", "result")
        self.launch_seconds = self._histogram("launch_seconds", "From accepted to ready.", _LAUNCH_SECONDS)
        self.launches_waiting = self._gauge("launches_waiting", "Launches that wait for their turn.")
        self.exits = self._counter("exits", "Verdicts recorded.", "kind", "component")
        self.engine_calls = self._counter("engine_calls", "Calls to the engine.", "call", "result")
        self.engine_call_seconds = self._histogram(
            "engine_call_seconds", "How long calls to the engine took.", _ENGINE_SECONDS, "call"
        )
        self.engine_events_lost = self._counter("engine_events_lost", "Times the engine's event stream was lost.")
        self.engine_events_connected = self._gauge(
            "engine_events_connected", "Whether the engine's events are being read."
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(PREFIX + name, text, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(PREFIX + name, text, labels, buckets=buckets, registry=self.registry)

    def exited(self, verdict: Verdict) -> None:
        """Count a recorded verdict."""
        self.exits.labels(verdict.kind.value, verdict.component.value).inc()

    def engine_events(self, connected: bool) -> None:
        """Note that the engine's events are being read, or were lost."""
        if self._reading and not connected:
            self.engine_events_lost.inc()
        self._reading = connected
        self.engine_events_connected.set(1 if connected else 0)

    def slots(self, count: int) -> asyncio.Semaphore:
        """A semaphore of `count` launches at a time; whoever waits for it is counted as waiting."""
        return _CountedSlots(count, self.launches_waiting)

    @contextmanager
    def engine_call(self, call: str) -> Iterator[None]:
        """Time one call of the `Engine` protocol and count how it ended."""
        begun, result = time.perf_counter(), "ok"
        try:
            yield
        except asyncio.CancelledError:
            result = "cancelled"
            raise
        except EngineError as error:
            result = next(word for kind, word in _RESULTS if isinstance(error, kind))
            raise
        except Exception:
            result = "error"
            raise
        finally:
            self.engine_calls.labels(call, result).inc()
            self.engine_call_seconds.labels(call).observe(time.perf_counter() - begun)

    def watch_state(self, table: SandboxTable, hub: WatchHub[Any]) -> None:
        """Report the sandboxes of a table and the readers of a hub, as they are when somebody asks."""
        self.registry.register(_State(table, hub))


class _CountedSlots(asyncio.Semaphore):
    def __init__(self, count: int, waiting: Gauge) -> None:
        super().__init__(count)
        self._waiting = waiting

    async def acquire(self) -> Literal[True]:
        """Take a slot, and be counted until there is one."""
        with self._waiting.track_inprogress():
            return await super().acquire()


class _State(Collector):
    """Gauges that are read when they are asked for, so that nothing has to keep them up to date."""

    def __init__(self, table: SandboxTable, hub: WatchHub[Any]) -> None:
        self._table = table
        self._hub = hub

    def collect(self) -> Iterable[Metric]:
        phases = [sandbox.record.shown_phase for sandbox in self._table]
        sandboxes = GaugeMetricFamily(
            PREFIX + "sandboxes", "Sandboxes by phase; ended: failed after it was ready.", labels=["phase"]
        )
        for phase in (*(member.value for member in RecordPhase), ENDED):
            sandboxes.add_metric([phase], phases.count(phase))
        yield sandboxes
        yield GaugeMetricFamily(PREFIX + "watch_readers", "Open watches.", value=self._hub.reader_count)
        yield CounterMetricFamily(
            PREFIX + "watch_readers_cut_off", "Watches ended because they fell behind.", value=self._hub.cut_off_count
        )


@contextmanager
def serving(metrics: Metrics, port: int) -> Iterator[int]:
    """Serve metrics on a loopback port; yields the port.

    Raises:
        ConfigurationError: The port is taken.
    """
    try:
        server, thread = start_http_server(port, addr=LOOPBACK, registry=metrics.registry)
    except OSError as error:
        raise ConfigurationError(f"metrics_port {port} of {LOOPBACK} cannot be used: {error.strerror}") from error
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class LaunchCounter:
    """Counts launches from what the driver publishes anyway."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._begun: dict[str, float] = {}

    def see(self, event: WatchEvent) -> None:
        """Take note of one published event."""
        if isinstance(event, Deleted):
            self._end(event.sandbox_id, "cancelled")
        elif isinstance(event, Snapshot):
            self._see_snapshot(event)
        elif event.reason == SCHEDULED:
            self._begun[event.sandbox_id] = self._clock()
        elif event.reason == STARTED:
            begun = self._begun.pop(event.sandbox_id, None)
            self._metrics.launches.labels("ready").inc()
            if begun is not None:
                self._metrics.launch_seconds.observe(self._clock() - begun)

    def _see_snapshot(self, snapshot: Snapshot) -> None:
        ready = next((condition for condition in snapshot.conditions if condition.type == READY), None)
        if ready is None or snapshot.deleting or ready.status is not ConditionStatus.FALSE:
            return
        if ready.reason == Reason.STARTING:
            self._begun.setdefault(snapshot.sandbox_id, self._clock())  # a start of a stopped sandbox
        elif ready.reason == Reason.CONTAINER_STOPPED:
            self._end(snapshot.sandbox_id, "cancelled")
        else:
            self._end(snapshot.sandbox_id, "failed")

    def _end(self, sandbox_id: str, result: str) -> None:
        """Count how a launch ended, where one is under way."""
        if self._begun.pop(sandbox_id, None) is not None:
            self._metrics.launches.labels(result).inc()
