"""Times for gateways of the older generation, read through message shapes of that generation."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from driver_docker import encode, events
from driver_docker.events import Condition, ConditionStatus, EventType, PlatformEvent, Snapshot
from openshell.wire.compute.v1 import compute_driver_pb2 as pb

TIME = datetime(2026, 8, 21, 12, 30, 15, 250_000, tzinfo=UTC)
_TEXT = descriptor_pb2.FieldDescriptorProto.TYPE_STRING
_INT64 = descriptor_pb2.FieldDescriptorProto.TYPE_INT64


def _older_message(name: str, fields: list[tuple[int, str, int]]) -> type[Any]:
    """A message class of the older contract (compute-driver contract 2.2), independent of the current one."""
    file = descriptor_pb2.FileDescriptorProto(name=f"{name}.proto", package="older", syntax="proto3")
    message = file.message_type.add(name=name)
    for number, field, kind in fields:
        message.field.add(name=field, number=number, type=kind, label=1)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"older.{name}"))


TEXTS = [(1, "type", _TEXT), (2, "status", _TEXT), (3, "reason", _TEXT), (4, "message", _TEXT)]
OlderCondition = _older_message("DriverCondition", [*TEXTS, (5, "last_transition_time", _TEXT)])
OlderEvent = _older_message("DriverPlatformEvent", [(1, "timestamp_ms", _INT64), (4, "reason", _TEXT)])


def _snapshot() -> Snapshot:
    return Snapshot(
        sandbox_id="s1",
        name="one",
        workspace="default",
        namespace="default",
        container_name="c",
        container_id="1",
        conditions=(
            Condition(
                type="Ready",
                status=ConditionStatus.FALSE,
                reason="Starting",
                message="",
                transition_time=TIME,
            ),
        ),
        deleting=False,
    )


def test_an_older_gateway_reads_its_own_times_beside_the_rest() -> None:
    condition = encode.sandbox(_snapshot(), older_gateway=True).status.conditions[0]
    older = OlderCondition.FromString(condition.SerializeToString())
    assert older.last_transition_time == "2026-08-21T12:30:15Z"
    assert (older.type, older.status, older.reason) == ("Ready", "False", "Starting")
    event = encode.watch_event(events.scheduled("s1", TIME, image="i"), older_gateway=True).platform_event.event
    older_event = OlderEvent.FromString(event.SerializeToString())
    assert older_event.timestamp_ms == int(TIME.timestamp() * 1000)
    assert older_event.reason == "Scheduled"


def test_a_current_gateway_skips_them_and_finds_its_own() -> None:
    plain = encode.sandbox(_snapshot())
    both = encode.sandbox(_snapshot(), older_gateway=True)
    read = pb.DriverSandbox.FromString(both.SerializeToString())
    assert read.status.conditions[0].transition_time.ToDatetime(tzinfo=UTC) == TIME
    read.DiscardUnknownFields()
    assert read == plain
    event = events.scheduled("s1", TIME, image="i")
    again = pb.WatchSandboxesEvent.FromString(encode.watch_event(event, older_gateway=True).SerializeToString())
    assert again.platform_event.event.event_time.ToDatetime(tzinfo=UTC) == TIME
    again.DiscardUnknownFields()
    assert again == encode.watch_event(event)


def test_nothing_is_added_for_a_current_gateway() -> None:
    condition = encode.sandbox(_snapshot()).status.conditions[0]
    assert OlderCondition.FromString(condition.SerializeToString()).last_transition_time == ""


@pytest.mark.parametrize("time", [datetime(1969, 12, 31, 23, 59, 59, tzinfo=UTC), datetime(1970, 1, 1, tzinfo=UTC)])
def test_times_before_and_at_the_epoch_keep_their_sign(time: datetime) -> None:
    event = PlatformEvent(sandbox_id="s1", time=time, type=EventType.NORMAL, reason="R", message="m", metadata={})
    encoded = encode.watch_event(event, older_gateway=True).platform_event.event.SerializeToString()
    assert OlderEvent.FromString(encoded).timestamp_ms == int(time.timestamp()) * 1000
