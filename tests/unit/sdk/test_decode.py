from __future__ import annotations

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given
from hypothesis import strategies as st

from openshell._decode import decode
from openshell.errors import MalformedResponseError
from openshell.v1 import ListSandboxesResponse, Sandbox, SandboxPhase, SandboxStreamEvent
from openshell.wire.v1 import openshell_pb2 as pb


def filled() -> pb.Sandbox:
    message = pb.Sandbox()
    message.metadata.name = "ünïcode"
    message.metadata.labels["k"] = "v"
    message.metadata.created_time.FromJsonString("2026-01-02T03:04:05.678901Z")
    message.spec.command.extend(["a", "b"])
    message.spec.template.resources.update({"limits": {"cpu": "1"}, "list": [1, True, None, "x"]})
    message.spec.template.user_namespaces = False
    message.spec.resource_requirements.gpu.SetInParent()
    message.status.phase = pb.SANDBOX_PHASE_READY
    message.status.exit_code = 0
    message.status.conditions.add(type="Ready", status="True")
    return message


def test_equals_what_betterproto2_parses_itself() -> None:
    payload = filled().SerializeToString()
    assert decode(payload, pb.Sandbox, Sandbox, source="t") == Sandbox.parse(payload)


def test_presence_survives() -> None:
    found = decode(filled().SerializeToString(), pb.Sandbox, Sandbox, source="t")
    assert found.status is not None
    assert found.status.exit_code == 0
    assert found.status.configuration_activated is None
    assert found.spec is not None
    assert found.spec.template is not None
    assert found.spec.template.user_namespaces is False
    assert found.spec.resource_requirements is not None
    assert found.spec.resource_requirements.gpu is not None
    assert found.spec.resource_requirements.gpu.count is None


def test_unknown_enum_numbers_and_unknown_fields_survive_a_round_trip() -> None:
    newer = descriptor_pb2.FileDescriptorProto(name="newer.proto", package="t", syntax="proto3")
    message = newer.message_type.add(name="Newer")
    for name, number, kind in (("phase", 6, 5), ("added", 999, 9)):
        message.field.add(name=name, number=number, type=kind, label=1)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(newer.SerializeToString())
    newer_type = message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Newer"))
    payload = newer_type(phase=99, added="kept").SerializeToString()
    wrapped = pb.Sandbox(status=pb.SandboxStatus.FromString(payload)).SerializeToString()
    found = decode(wrapped, pb.Sandbox, Sandbox, source="t")
    assert found.status is not None
    assert found.status.phase == 99
    assert str(found.status.phase) == "UNKNOWN(99)"
    assert found.status.phase not in set(SandboxPhase)
    again = newer_type.FromString(bytes(found.status))
    assert (again.phase, again.added) == (99, "kept")  # type: ignore[attr-defined]


@pytest.mark.parametrize("payload", [b"\xff", b"\x0a\x05ab", b"\x0a\x02\xc3\x28x", b"\x08"])
def test_malformed_bytes_are_an_error_that_does_not_quote_them(payload: bytes) -> None:
    with pytest.raises(
        MalformedResponseError, match=r"GetSandbox answered \d+ bytes that are not a valid openshell\.v1"
    ):
        decode(payload, pb.ListSandboxesResponse, ListSandboxesResponse, source="GetSandbox")


def test_a_time_out_of_range_is_malformed() -> None:
    message = pb.SandboxStreamEvent()
    message.event.event_time.seconds = 10**15
    with pytest.raises(MalformedResponseError):
        decode(message.SerializeToString(), pb.SandboxStreamEvent, SandboxStreamEvent, source="t")


@given(st.binary(max_size=200))
def test_arbitrary_bytes_decode_or_are_refused(payload: bytes) -> None:
    try:
        found = decode(payload, pb.SandboxStreamEvent, SandboxStreamEvent, source="t")
    except MalformedResponseError:
        return
    assert isinstance(found, SandboxStreamEvent)
