"""Our contracts against the descriptor sets of published releases: every fact that reaches the wire."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import FileDescriptor

from openshell.schema import read_descriptor_set
from openshell.wire.compute.v1 import compute_driver_pb2
from openshell.wire.datamodel.v1 import datamodel_pb2
from openshell.wire.extension.v1 import extension_pb2
from openshell.wire.isolation.backend.v1 import isolation_backend_pb2
from openshell.wire.options.v1 import options_pb2
from openshell.wire.sandbox.protocol.v1 import sandbox_protocol_pb2
from openshell.wire.sandbox.v1 import sandbox_pb2
from openshell.wire.v1 import openshell_pb2

Facts = dict[str, object]

PUBLIC = "openshell-0.1.5"
CASES = [
    (openshell_pb2.DESCRIPTOR, PUBLIC),
    (datamodel_pb2.DESCRIPTOR, PUBLIC),
    (sandbox_pb2.DESCRIPTOR, PUBLIC),
    (options_pb2.DESCRIPTOR, PUBLIC),
    (compute_driver_pb2.DESCRIPTOR, "compute-driver-v0.1.2"),
    (extension_pb2.DESCRIPTOR, "compute-driver-v0.1.2"),
    (extension_pb2.DESCRIPTOR, "isolation-v1"),
    (isolation_backend_pb2.DESCRIPTOR, "isolation-v1"),
    (sandbox_protocol_pb2.DESCRIPTOR, "isolation-v1"),
]

ADDED = {"openshell.v1.ReportSandboxConfigurationRequest.refused_before_start"}
"""What ours has beyond the published sets."""


def facts_of(file: descriptor_pb2.FileDescriptorProto) -> Facts:
    """One entry a declaration; the value holds everything about it but its name."""
    facts: Facts = {"package": file.package, "syntax": file.syntax}
    for name, message in _messages(file.package, file.message_type):
        facts[name] = (
            "message",
            message.options.SerializeToString(deterministic=True),
            [(r.start, r.end) for r in message.reserved_range],
            list(message.reserved_name),
            [one.name for one in message.oneof_decl],
            [(r.start, r.end) for r in message.extension_range],
        )
        for field in message.field:
            facts[f"{name}.{field.name}"] = _field(field)
        for enum in message.enum_type:
            facts.update(_enum(name, enum))
    for enum in file.enum_type:
        facts.update(_enum(file.package, enum))
    for extension in file.extension:
        facts[f"extend {extension.extendee} {file.package}.{extension.name}"] = _field(extension)
    for service in file.service:
        for method in service.method:
            facts[f"{file.package}.{service.name}/{method.name}"] = (
                method.input_type,
                method.output_type,
                method.client_streaming,
                method.server_streaming,
                method.options.SerializeToString(deterministic=True),
            )
    return facts


def _messages(
    scope: str, messages: Iterable[descriptor_pb2.DescriptorProto]
) -> Iterator[tuple[str, descriptor_pb2.DescriptorProto]]:
    for message in messages:
        name = f"{scope}.{message.name}"
        yield name, message
        yield from _messages(name, message.nested_type)


def _field(field: descriptor_pb2.FieldDescriptorProto) -> tuple[object, ...]:
    return (
        field.number,
        field.type,
        field.label,
        field.type_name,
        field.oneof_index if field.HasField("oneof_index") else None,
        field.proto3_optional,
        field.default_value,
        field.options.SerializeToString(deterministic=True),
    )


def _enum(scope: str, enum: descriptor_pb2.EnumDescriptorProto) -> Facts:
    name = f"{scope}.{enum.name}"
    facts: Facts = {
        name: (
            "enum",
            enum.options.SerializeToString(deterministic=True),
            [(r.start, r.end) for r in enum.reserved_range],
            list(enum.reserved_name),
        )
    }
    for value in enum.value:
        facts[f"{name}.{value.name}"] = (value.number, value.options.SerializeToString(deterministic=True))
    return facts


@pytest.mark.parametrize(("ours", "published"), CASES, ids=[f"{ours.package}-{name}" for ours, name in CASES])
def test_contract_is_wire_equal_to_the_published_descriptors(ours: FileDescriptor, published: str) -> None:
    have = facts_of(descriptor_pb2.FileDescriptorProto.FromString(ours.serialized_pb))
    want: Facts = {}
    for file in read_descriptor_set(published).file:
        if file.package == ours.package:
            want.update(facts_of(file))
    assert len(want) > 2
    assert {name: have.get(name) for name in want} == want
    assert set(have) - set(want) <= ADDED


def test_the_comparison_sees_a_changed_number() -> None:
    files = [f for f in read_descriptor_set(PUBLIC).file if f.package == "openshell.datamodel.v1"]
    before = facts_of(files[0])
    files[0].message_type[0].field[0].number += 40
    assert facts_of(files[0]) != before
