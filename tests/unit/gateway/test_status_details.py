from __future__ import annotations

from google.protobuf import any_pb2, descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from gateway_embedded import status_details
from gateway_embedded.errors import ConflictError, GatewayError, InvalidRequestError
from openshell.status import StatusCode

TEXT = descriptor_pb2.FieldDescriptorProto.TYPE_STRING
MESSAGE = descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE


def google_rpc() -> dict[str, type[Message]]:
    """The public messages, declared as their documentation says."""
    file = descriptor_pb2.FileDescriptorProto(
        name="rpc_for_test.proto", package="google.rpc", syntax="proto3", dependency=["google/protobuf/any.proto"]
    )

    def add(owner: descriptor_pb2.DescriptorProto, name: str, number: int, kind: int, of: str = "") -> None:
        many = 3 if of else 1
        added = owner.field.add(name=name, number=number, type=kind, label=many)
        if of:
            added.type_name = of

    status = file.message_type.add(name="Status")
    add(status, "code", 1, descriptor_pb2.FieldDescriptorProto.TYPE_INT32)
    add(status, "message", 2, TEXT)
    add(status, "details", 3, MESSAGE, ".google.protobuf.Any")
    info = file.message_type.add(name="ErrorInfo")
    add(info, "reason", 1, TEXT)
    add(info, "domain", 2, TEXT)
    entry = info.nested_type.add(name="MetadataEntry", options=descriptor_pb2.MessageOptions(map_entry=True))
    add(entry, "key", 1, TEXT)
    add(entry, "value", 2, TEXT)
    add(info, "metadata", 3, MESSAGE, ".google.rpc.ErrorInfo.MetadataEntry")
    bad = file.message_type.add(name="BadRequest")
    violation = bad.nested_type.add(name="FieldViolation")
    add(violation, "field", 1, TEXT)
    add(violation, "description", 2, TEXT)
    add(bad, "field_violations", 1, MESSAGE, ".google.rpc.BadRequest.FieldViolation")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(any_pb2.DESCRIPTOR.serialized_pb)
    pool.AddSerializedFile(file.SerializeToString())
    names = ("Status", "ErrorInfo", "BadRequest")
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"google.rpc.{name}")) for name in names}


RPC = google_rpc()


@given(st.text(max_size=3000), st.dictionaries(st.text(max_size=40), st.text(max_size=300), max_size=4))
def test_details_can_be_read_by_any_client(message: str, facts: dict[str, str]) -> None:
    error = GatewayError(message, reason="SOME_REASON", status=StatusCode.ABORTED, facts=_encodable(facts))
    status = RPC["Status"].FromString(status_details.encode(error))
    assert (status.code, status.message) == (10, error.public_message)  # type: ignore[attr-defined]
    assert 0 < len(error.public_message.encode()) <= 1024
    (detail,) = status.details  # type: ignore[attr-defined]
    assert detail.type_url == "type.googleapis.com/google.rpc.ErrorInfo"
    info = RPC["ErrorInfo"].FromString(detail.value)
    assert (info.reason, info.domain) == ("SOME_REASON", "openshell.nvidia.com")  # type: ignore[attr-defined]
    assert dict(info.metadata) == _encodable(facts)  # type: ignore[attr-defined]


def test_a_malformed_field_is_named() -> None:
    error = InvalidRequestError("spec is required", field="spec")
    status = RPC["Status"].FromString(status_details.encode(error))
    bad = RPC["BadRequest"].FromString(status.details[1].value)  # type: ignore[attr-defined]
    (violation,) = bad.field_violations  # type: ignore[attr-defined]
    assert (violation.field, violation.description) == ("spec", "spec is required")


def test_a_conflict_says_how_to_recover() -> None:
    error = ConflictError("moved", facts={"recovery": "REFRESH_STATE", "current_resource_version": "7"})
    status = RPC["Status"].FromString(status_details.encode(error))
    info = RPC["ErrorInfo"].FromString(status.details[0].value)  # type: ignore[attr-defined]
    assert info.reason == "RESOURCE_VERSION_CONFLICT"  # type: ignore[attr-defined]
    assert info.metadata["current_resource_version"] == "7"  # type: ignore[attr-defined]


def _encodable(facts: dict[str, str]) -> dict[str, str]:
    return {
        key.encode("utf-8", "ignore").decode(): value.encode("utf-8", "ignore").decode() for key, value in facts.items()
    }
