"""Bytes to betterproto2 objects, through protobuf's own parser.

betterproto2's parser is several hundred times slower than upb and accepts malformed input. So bytes are parsed strictly
by upb, and the betterproto2 object is built from its fields. Unknown fields and unknown enum numbers survive.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from openshell.errors import MalformedResponseError

if TYPE_CHECKING:
    import betterproto2
    from betterproto2 import ProtoClassMetadata
    from google.protobuf.message import Message as WireMessage

M = TypeVar("M", bound="betterproto2.Message")

# upb hands out field values as Any, betterproto2 types its fields by annotation only.
_Convert = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    convert: _Convert | None
    repeated: bool
    map_value: bool


def decode(payload: bytes, wire: type[WireMessage], target: type[M], *, source: str) -> M:
    """Parse ``payload`` strictly and return it as ``target``.

    Args:
        payload: One encoded message.
        wire: The protobuf class of the message.
        target: The betterproto2 class of the same message.
        source: What sent it, for the error text.

    Raises:
        MalformedResponseError: The bytes are not such a message.
    """
    try:
        return _build(wire.FromString(payload), target)
    except (DecodeError, OverflowError, ValueError) as error:
        raise MalformedResponseError(source, wire.DESCRIPTOR.full_name, len(payload)) from error


def _build(message: WireMessage, target: type[M]) -> M:
    plan = _plan(target)
    values: dict[str, Any] = {}
    for descriptor, value in message.ListFields():
        field = plan.get(descriptor.number)
        if field is None:
            continue
        convert = field.convert
        if field.map_value:
            values[field.name] = {k: value[k] if convert is None else convert(value[k]) for k in value}
        elif field.repeated:
            values[field.name] = list(value) if convert is None else [convert(item) for item in value]
        else:
            values[field.name] = value if convert is None else convert(value)
    built = target(**values)
    if len(UnknownFieldSet(message)):
        built._unknown_fields = _unknown_bytes(message)  # noqa: SLF001 - betterproto2 has no public way to keep them
    return built


def _unknown_bytes(message: WireMessage) -> bytes:
    rest = type(message)()
    rest.CopyFrom(message)
    for descriptor, _ in message.ListFields():
        rest.ClearField(descriptor.name)
    return rest.SerializeToString()


@functools.cache
def _plan(target: type[betterproto2.Message]) -> dict[int, _Field]:
    # The generated code's own table of fields; betterproto2 types the property for instances only.
    meta: ProtoClassMetadata = getattr(target, "_betterproto")  # noqa: B009
    plan: dict[int, _Field] = {}
    for number, name in meta.field_name_by_number.items():
        field = meta.meta_by_field_name[name]
        if field.proto_type == "map" and field.map_meta is not None:
            value = field.map_meta[1]
            convert = _converter(value.proto_type, value.unwrap, meta.cls_by_field[f"{name}.value"])
            plan[number] = _Field(name, convert, repeated=False, map_value=True)
        else:
            convert = _converter(field.proto_type, field.unwrap, meta.cls_by_field[name])
            plan[number] = _Field(name, convert, repeated=bool(field.repeated), map_value=False)
    return plan


def _converter(proto_type: str, unwrap: Callable[[], type] | None, target: type[Any]) -> _Convert | None:
    if proto_type == "enum":
        return target
    if proto_type != "message":
        return None
    if unwrap is None:
        return functools.partial(_build, target=target)
    wrapped: type[Any] = unwrap()
    return lambda message: _build(message, wrapped).to_wrapped()
