"""Metrics: bounded label sets, honest counts, loopback only."""

from __future__ import annotations

import asyncio
import socket
import urllib.request
from datetime import UTC, datetime
from typing import Any, cast

import pytest

from driver_docker import events
from driver_docker.engine import (
    Engine,
    EngineAbsentError,
    EngineConflictError,
    EngineError,
    EngineIncompatibleError,
    EngineRefusedError,
    EngineTimeoutError,
    EngineUnreachableError,
)
from driver_docker.errors import ConfigurationError
from driver_docker.events import Condition, ConditionStatus, Snapshot
from driver_docker.metered_engine import CALLS, metered
from driver_docker.metrics import LaunchCounter, Metrics, serving
from driver_docker.sandbox_record import Failure, RecordPhase, SandboxRecord
from driver_docker.sandboxes import SandboxTable
from driver_docker.watch import WatchHub
from openshell.verdicts import Component, Verdict, VerdictKind

AT = datetime(2026, 10, 5, 12, tzinfo=UTC)


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"openshell_driver_{name}", labels)


def snapshot(reason: str, status: ConditionStatus = ConditionStatus.FALSE, *, deleting: bool = False) -> Snapshot:
    ready = Condition(type="Ready", status=status, reason=reason, message="m", transition_time=AT)
    return Snapshot(
        sandbox_id="sb",
        name="n",
        namespace="ns",
        workspace="w",
        container_name="c",
        container_id="i",
        conditions=(ready,),
        deleting=deleting,
    )


class FakeEngine:
    """Raises what it is told to, and has something that is no call."""

    info = "the info"

    def __init__(self, error: Exception | None) -> None:
        self._error = error

    async def ping(self) -> None:
        if self._error is not None:
            raise self._error

    async def close(self) -> None:
        return


@pytest.mark.parametrize(
    ("error", "result"),
    [
        (None, "ok"),
        (EngineAbsentError("x"), "absent"),
        (EngineConflictError("x"), "conflict"),
        (EngineRefusedError("x"), "refused"),
        (EngineTimeoutError("x"), "timeout"),
        (EngineUnreachableError("x"), "unreachable"),
        (EngineIncompatibleError("x"), "incompatible"),
        (EngineError("x"), "error"),
        (RuntimeError("x"), "error"),
        (asyncio.CancelledError(), "cancelled"),
    ],
)
async def test_engine_calls_are_counted_by_how_they_ended(error: Exception | None, result: str) -> None:
    metrics = Metrics()
    engine = metered(cast("Engine", FakeEngine(error)), metrics)
    for _ in range(2):
        try:
            await engine.ping()
        except BaseException as raised:
            assert raised is error
    assert value(metrics, "engine_calls_total", call="ping", result=result) == 2
    assert value(metrics, "engine_call_seconds_count", call="ping") == 2
    assert cast("Any", engine).info == "the info"
    await engine.close()


def test_the_calls_of_the_protocol_are_the_only_ones() -> None:
    assert {"ping", "subscribe", "create_container", "pull_image"} <= CALLS
    assert not CALLS & {"close", "info", "__aenter__"}


@pytest.mark.parametrize(
    ("seen", "result"),
    [
        ([events.started("sb", AT, container_name="c")], "ready"),
        ([snapshot("Starting"), snapshot("ImagePullFailed"), snapshot("ImagePullFailed")], "failed"),
        ([snapshot("Deleting", deleting=True), events.Deleted(sandbox_id="sb")], "cancelled"),
        ([snapshot("ContainerStopped")], "cancelled"),
        ([snapshot("ContainerPaused", ConditionStatus.UNKNOWN)], None),
    ],
)
def test_each_launch_is_counted_once(seen: list[events.WatchEvent], result: str | None) -> None:
    metrics, ticks = Metrics(), iter(range(10))
    counter = LaunchCounter(metrics, clock=lambda: float(next(ticks)))
    counter.see(events.scheduled("sb", AT, image="i"))
    for event in seen:
        counter.see(event)
    for kind in ("ready", "failed", "cancelled"):
        assert value(metrics, "launches_total", result=kind) == (1 if kind == result else None)
    assert value(metrics, "launch_seconds_sum") == (1 if result == "ready" else 0)
    # What happens to a sandbox after its launch is no launch.
    counter.see(snapshot("ContainerExited"))
    counter.see(events.Deleted(sandbox_id="sb"))
    if result is not None:
        assert value(metrics, "launches_total", result=result) == 1


def test_a_start_of_a_stopped_sandbox_is_a_launch() -> None:
    metrics = Metrics()
    counter = LaunchCounter(metrics, clock=lambda: 0.0)
    for reason in ("Starting", "Starting", "ControlSupervisorStartFailed", "ControlSupervisorStartFailed"):
        counter.see(snapshot(reason))
    assert value(metrics, "launches_total", result="failed") == 1
    counter.see(snapshot("Starting"))
    counter.see(events.started("sb", AT, container_name="c"))
    assert value(metrics, "launches_total", result="ready") == 1


async def test_state_is_read_when_it_is_asked_for() -> None:
    metrics, table, hub = Metrics(), SandboxTable(), WatchHub[str]()
    metrics.watch_state(table, hub)
    table.add(SandboxRecord(sandbox_id="sb", name="n", workspace="w", phase=RecordPhase.PROVISIONING, changed_at=AT))
    with hub.subscribe():
        assert value(metrics, "watch_readers") == 1
    assert value(metrics, "watch_readers") == 0
    assert value(metrics, "watch_readers_cut_off_total") == 0
    assert value(metrics, "sandboxes", phase="provisioning") == 1
    assert all(value(metrics, "sandboxes", phase=phase.value) is not None for phase in RecordPhase)
    ended = SandboxRecord(
        sandbox_id="sb-2",
        name="m",
        workspace="w",
        phase=RecordPhase.ACTIVE,
        changed_at=AT,
        failure=Failure(reason="r", message="m", at=AT),
    )
    table.add(ended)
    assert (value(metrics, "sandboxes", phase="active"), value(metrics, "sandboxes", phase="ended")) == (0, 1)


async def test_waiting_launches_are_counted() -> None:
    metrics = Metrics()
    slots = metrics.slots(1)
    async with slots:
        waiting = asyncio.create_task(slots.acquire())
        await asyncio.sleep(0)
        assert value(metrics, "launches_waiting") == 1
    await waiting
    assert value(metrics, "launches_waiting") == 0


def test_losses_of_the_event_stream_are_counted_once_each() -> None:
    metrics = Metrics()
    for connected in (True, False, False, True, False):
        metrics.engine_events(connected)
    assert value(metrics, "engine_events_lost_total") == 2
    assert value(metrics, "engine_events_connected") == 0


def test_exits_are_counted_by_kind() -> None:
    metrics = Metrics()
    metrics.exited(Verdict(kind=VerdictKind.OUT_OF_MEMORY, reason="r", component=Component.WORKLOAD))
    assert value(metrics, "exits_total", kind="out_of_memory", component="workload") == 1


def test_metrics_are_served_on_loopback_until_the_end() -> None:
    metrics = Metrics()
    with serving(metrics, 0) as port:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        assert "openshell_driver_launches_waiting 0.0" in text
        with socket.socket() as elsewhere:  # an address of this machine other than the one that is served
            assert elsewhere.connect_ex(("127.0.0.2", port)) != 0
        with pytest.raises(ConfigurationError, match="metrics_port"), serving(metrics, port):
            pass
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
