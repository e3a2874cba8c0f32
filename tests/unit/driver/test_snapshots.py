"""Conditions of a sandbox (compute-driver contract 5.11), and what watchers are told on the wire."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from driver_docker import encode, events
from driver_docker.engine_objects import ContainerFacts, ContainerStatus, HealthStatus, PullProgress
from driver_docker.events import ConditionStatus
from driver_docker.sandbox_record import Failure, RecordPhase, SandboxRecord
from driver_docker.snapshots import take_snapshot

AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
RECORD = SandboxRecord(
    sandbox_id="sb-1",
    name="My Name",
    workspace="w",
    phase=RecordPhase.ACTIVE,
    changed_at=AT,
    container_name="openshell-w--my-name-sb-1",
    workload_id="c1",
)
FACTS = ContainerFacts(
    container_id="c1",
    name="x",
    image_id="i",
    labels={},
    status=ContainerStatus.RUNNING,
    exit_code=0,
    oom_killed=False,
    error="",
    created_at=AT,
    started_at=AT,
    finished_at=None,
    network_mode="none",
    networks=("none",),
    health=HealthStatus.NONE,
    memory_limit_bytes=None,
    tty=False,
)
FAILURE = Failure(reason="ControlSupervisorExited", message="it went", at=AT + timedelta(seconds=9))


@pytest.mark.parametrize(
    ("phase", "failure", "status", "expected"),
    [
        (RecordPhase.ACTIVE, None, "running", ("True", "BackendReady", False)),
        (RecordPhase.ACTIVE, None, "created", ("False", "Starting", False)),
        (RecordPhase.ACTIVE, None, "odd-new-state", ("False", "Starting", False)),
        (RecordPhase.ACTIVE, None, "restarting", ("False", "ContainerRestarting", False)),
        (RecordPhase.ACTIVE, None, "removing", ("False", "Deleting", True)),
        (RecordPhase.ACTIVE, FAILURE, "removing", ("False", "ControlSupervisorExited", False)),
        (RecordPhase.ACTIVE, None, "paused", ("Unknown", "ContainerPaused", False)),
        (RecordPhase.ACTIVE, None, "exited", ("False", "ContainerExited", False)),
        (RecordPhase.ACTIVE, None, "dead", ("False", "ContainerDead", False)),
        (RecordPhase.ACTIVE, FAILURE, "running", ("False", "ControlSupervisorExited", False)),
        (RecordPhase.PROVISIONING, None, "running", ("False", "Starting", False)),
        (RecordPhase.PROVISIONING, None, None, ("False", "Starting", False)),
        (RecordPhase.FAILED, FAILURE, None, ("False", "ControlSupervisorExited", False)),
        (RecordPhase.STOPPED, None, "exited", ("False", "ContainerStopped", False)),
        (RecordPhase.STOPPED, None, "running", ("False", "ContainerStopped", False)),
        (RecordPhase.DELETING, FAILURE, "running", ("False", "Deleting", True)),
    ],
)
def test_the_ready_condition(
    phase: RecordPhase, failure: Failure | None, status: str | None, expected: tuple[str, str, bool]
) -> None:
    facts = replace(FACTS, status=ContainerStatus(status)) if status else None
    snapshot = take_snapshot(replace(RECORD, phase=phase, failure=failure), facts, namespace="ns")
    ready = snapshot.conditions[0]
    assert (ready.type, ready.status, ready.reason, snapshot.deleting) == ("Ready", *expected)
    assert ready.message
    assert [c.type for c in snapshot.conditions[1:]] == (["Suspended"] if phase is RecordPhase.STOPPED else [])


def test_a_failure_is_dated_by_what_caused_it() -> None:
    snapshot = take_snapshot(replace(RECORD, failure=FAILURE), FACTS, namespace="ns")
    assert snapshot.conditions[0].transition_time == FAILURE.at
    assert take_snapshot(RECORD, FACTS, namespace="ns").conditions[0].transition_time == AT


def test_the_wire_echoes_the_gateways_name_and_carries_the_containers_beside_it() -> None:
    message = encode.sandbox(take_snapshot(RECORD, FACTS, namespace="ns"))
    assert (message.id, message.name, message.namespace, message.workspace) == ("sb-1", "My Name", "ns", "w")
    assert (message.status.name, message.status.instance_id) == ("openshell-w--my-name-sb-1", "c1")
    assert not message.HasField("spec")
    assert message.status.conditions[0].transition_time.seconds == int(AT.timestamp())


def test_texts_on_the_wire_are_one_bounded_line() -> None:
    failure = replace(FAILURE, message="a\nb\x1b[31m" + "ä" * 2000)
    message = encode.sandbox(take_snapshot(replace(RECORD, failure=failure), FACTS, namespace="ns"))
    text = message.status.conditions[0].message
    assert len(text.encode()) <= 1024
    assert text.isprintable()


def test_progress_events_carry_the_contracts_keys() -> None:
    told = events.scheduled("sb-1", AT, image="img:1")
    assert (told.reason, told.type) == ("Scheduled", "Normal")
    assert told.metadata == {
        "openshell.progress.complete_step": "requesting_sandbox",
        "openshell.progress.complete_label": "Sandbox allocated",
        "openshell.progress.active_step": "pulling_image",
        "openshell.progress.active_detail": "img:1",
        "image_ref": "img:1",
    }
    layer = PullProgress(status="Downloading", layer_id="abc", current_bytes=5 * 2**20, total_bytes=3 * 2**30)
    told = events.pulling_layer("sb-1", AT, image="img:1", progress=layer)
    assert told.metadata["openshell.progress.active_detail"] == "Downloading abc (5MB/3.0GB)"
    assert told.metadata["detail"] == "Downloading abc (5MB/3.0GB)"
    assert (told.metadata["docker_status"], told.metadata["layer_id"]) == ("Downloading", "abc")
    wire = encode.watch_event(told).platform_event
    assert (wire.event.source, wire.event.event_time.seconds) == ("docker", int(AT.timestamp()))
    assert encode.watch_event(events.Deleted(sandbox_id="sb-1")).deleted.sandbox_id == "sb-1"


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0B"), (1023, "1023B"), (1024, "1KB"), (2**20 - 1, "1023KB"), (2**20, "1MB"), (2**30, "1.0GB")],
)
def test_sizes_read_as_the_contract_has_them(size: int, text: str) -> None:
    assert events.byte_text(size) == text


def test_a_workload_that_could_not_be_looked_at_is_not_called_anything_else() -> None:
    (ready,) = take_snapshot(RECORD, None, namespace="ns").conditions
    assert (ready.status, ready.reason) == (ConditionStatus.UNKNOWN, "InspectFailed")
