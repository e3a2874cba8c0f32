"""The public schema as data: descriptor sets of published releases, and the hash that names a schema.

The hash is upstream's ``PUBLIC_RPC_SCHEMA_SHA256`` (public-api contract 3.1), so values can be compared with theirs. It
moves on any edit of the declarations, compatible or not: equality proves sameness, difference proves nothing.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources

from google.protobuf import descriptor_pb2, duration_pb2, struct_pb2, timestamp_pb2

from openshell.errors import UnknownReleaseError

SCHEMA_METADATA_KEY = "openshell-schema-sha256"
"""Response metadata key under which a gateway of this project names its public schema."""

CONTRACT_VERSION = "0.1.5"
"""The public API release that this SDK and the embedded gateway speak."""

PUBLIC_RELEASES = ("0.0.113", "0.0.116", "0.1.0", "0.1.4", "0.1.5")
"""Published releases whose descriptors ship with the SDK, oldest first."""

PUBLIC_SERVICES = ("openshell.v1.OpenShell", "openshell.inference.v1.Inference")
"""The services whose RPCs make up the public schema; the second one ended with 0.0.116."""

_WELL_KNOWN = (duration_pb2, struct_pb2, timestamp_pb2)


def read_descriptor_set(name: str) -> descriptor_pb2.FileDescriptorSet:
    """The shipped descriptor set ``<name>.binpb``."""
    path = resources.files("openshell.descriptors") / f"{name}.binpb"
    return descriptor_pb2.FileDescriptorSet.FromString(path.read_bytes())


def release_descriptors(version: str) -> descriptor_pb2.FileDescriptorSet:
    """The public API of the published release ``version``, for example ``"0.1.5"``.

    Raises:
        UnknownReleaseError: The SDK ships no descriptors of that release.
    """
    if version not in PUBLIC_RELEASES:
        raise UnknownReleaseError(version, known=PUBLIC_RELEASES)
    return read_descriptor_set(f"openshell-{version}")


def own_descriptors() -> descriptor_pb2.FileDescriptorSet:
    """The public API that this SDK was generated from."""
    from openshell.wire.datamodel.v1 import datamodel_pb2
    from openshell.wire.options.v1 import options_pb2
    from openshell.wire.sandbox.v1 import sandbox_pb2
    from openshell.wire.v1 import openshell_pb2

    found = descriptor_pb2.FileDescriptorSet()
    for module in (options_pb2, datamodel_pb2, sandbox_pb2, openshell_pb2):
        found.file.append(descriptor_pb2.FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaInventory:
    """What a public schema consists of, keyed by full name with a leading dot."""

    methods: tuple[str, ...]
    """One line a method, sorted: path, input, output, client streaming, server streaming, joined by bars."""
    messages: Mapping[str, descriptor_pb2.DescriptorProto]
    """The closure of all request and response types, map entries and Google's types included."""
    enums: Mapping[str, descriptor_pb2.EnumDescriptorProto]
    """The enums that the closure uses."""

    @property
    def sha256(self) -> str:
        """The public schema hash, lower-case hex (public-api contract 3.1)."""
        fingerprint = hashlib.sha256(self._lines().encode()).hexdigest()
        return hashlib.sha256("\n".join((*self.methods, fingerprint)).encode()).hexdigest()

    def _lines(self) -> str:
        parts = [_message_lines(name, self.messages[name]) for name in sorted(self.messages)]
        parts += [_enum_lines(name, self.enums[name]) for name in sorted(self.enums)]
        return "".join(parts)


def inventory(files: descriptor_pb2.FileDescriptorSet) -> SchemaInventory:
    """Everything that the public services of ``files`` can carry. Google's types are added when the set lacks them."""
    protos = list(files.file)
    present = {proto.name for proto in protos}
    protos += [
        descriptor_pb2.FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb)
        for module in _WELL_KNOWN
        if module.DESCRIPTOR.name not in present
    ]
    messages: dict[str, descriptor_pb2.DescriptorProto] = {}
    enums: dict[str, descriptor_pb2.EnumDescriptorProto] = {}
    for proto in protos:
        _index(f".{proto.package}", proto.message_type, proto.enum_type, messages, enums)

    methods: list[str] = []
    roots: list[str] = []
    for proto in protos:
        for service in proto.service:
            name = f"{proto.package}.{service.name}"
            if name not in PUBLIC_SERVICES:
                continue
            for method in service.method:
                roots += (method.input_type, method.output_type)
                streams = (str(flag).lower() for flag in (method.client_streaming, method.server_streaming))
                methods.append("|".join((f"{name}/{method.name}", method.input_type, method.output_type, *streams)))

    used_messages: dict[str, descriptor_pb2.DescriptorProto] = {}
    used_enums: dict[str, descriptor_pb2.EnumDescriptorProto] = {}
    while roots:
        name = roots.pop()
        if name in used_messages:
            continue
        used_messages[name] = messages[name]
        for field in messages[name].field:
            if field.type_name in messages:
                roots.append(field.type_name)
            elif field.type_name:
                used_enums[field.type_name] = enums[field.type_name]
    return SchemaInventory(methods=tuple(sorted(methods)), messages=used_messages, enums=used_enums)


@functools.cache
def own_schema_sha256() -> str:
    """The public schema hash of this SDK's own contract; computed once."""
    return inventory(own_descriptors()).sha256


def _index(
    scope: str,
    found: Iterable[descriptor_pb2.DescriptorProto],
    found_enums: Iterable[descriptor_pb2.EnumDescriptorProto],
    messages: dict[str, descriptor_pb2.DescriptorProto],
    enums: dict[str, descriptor_pb2.EnumDescriptorProto],
) -> None:
    for enum in found_enums:
        enums[f"{scope}.{enum.name}"] = enum
    for message in found:
        name = f"{scope}.{message.name}"
        messages[name] = message
        _index(name, message.nested_type, message.enum_type, messages, enums)


def _message_lines(name: str, message: descriptor_pb2.DescriptorProto) -> str:
    reserved = ", ".join(
        f"ReservedRange {{ start: Some({r.start}), end: Some({r.end}) }}" for r in message.reserved_range
    )
    oneofs = ", ".join(
        f'OneofDescriptorProto {{ name: Some("{one.name}"), options: None }}' for one in message.oneof_decl
    )
    lines = [
        "|".join(("message", name, _options(message), f"[{reserved}]", _names(message.reserved_name), f"[{oneofs}]"))
    ]
    lines += [
        "|".join(
            (
                "field",
                name,
                str(field.number),
                field.name,
                str(int(field.label)),
                str(int(field.type)),
                field.type_name,
                str(field.oneof_index if field.HasField("oneof_index") else -1),
                str(field.proto3_optional).lower(),
                _options(field),
            )
        )
        for field in message.field
    ]
    return "".join(f"{line}\n" for line in lines)


def _enum_lines(name: str, enum: descriptor_pb2.EnumDescriptorProto) -> str:
    reserved = ", ".join(
        f"EnumReservedRange {{ start: Some({r.start}), end: Some({r.end}) }}" for r in enum.reserved_range
    )
    lines = ["|".join(("enum", name, _options(enum), f"[{reserved}]", _names(enum.reserved_name)))]
    lines += ["|".join(("enum-value", name, str(value.number), value.name, _options(value))) for value in enum.value]
    return "".join(f"{line}\n" for line in lines)


def _names(names: Iterable[str]) -> str:
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"


def _options(
    declared: descriptor_pb2.DescriptorProto
    | descriptor_pb2.FieldDescriptorProto
    | descriptor_pb2.EnumDescriptorProto
    | descriptor_pb2.EnumValueDescriptorProto,
) -> str:
    """Hex of the standard options: upstream's library drops custom ones such as ``secret``."""
    if not declared.HasField("options"):
        return ""
    options = type(declared.options)()
    for field, _ in declared.options.ListFields():
        if not field.is_extension:
            setattr(options, field.name, getattr(declared.options, field.name))
    return options.SerializeToString(deterministic=True).hex()
