"""Frozen dataclasses to JSON objects and back, driven by their annotations.

Understood: ``str``, ``int``, ``bool``, ``bytes`` (an array of integers), ``object`` (any JSON), ``StrEnum``, nested
dataclasses, ``X | None``, unions of tagged dataclasses, ``tuple[X, ...]``, ``tuple[X, Y]`` and ``Mapping[str, X]``.

A dataclass with a class attribute ``TAG = (key, value)`` writes that member first and is recognised by it. Integer
bounds come from ``field(metadata=U16)`` and the like; without one an integer is an unsigned 64-bit number.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from enum import StrEnum

from openshell.isolation.errors import DocumentError
from openshell.isolation.json_fields import U64_MAX, JsonObject, check_integer, check_text

I32: Mapping[str, int] = types.MappingProxyType({"minimum": -(2**31), "maximum": 2**31 - 1})
U16: Mapping[str, int] = types.MappingProxyType({"minimum": 0, "maximum": 65535})
PORT: Mapping[str, int] = types.MappingProxyType({"minimum": 1, "maximum": 65535})
U32: Mapping[str, int] = types.MappingProxyType({"minimum": 0, "maximum": 2**32 - 1})
U64: Mapping[str, int] = types.MappingProxyType({"minimum": 0, "maximum": U64_MAX})


@dataclasses.dataclass(frozen=True, slots=True)
class _Member:
    name: str
    hint: object
    nullable: bool
    metadata: Mapping[str, int]


_MEMBERS: dict[type, tuple[_Member, ...]] = {}


def _members(cls: type) -> tuple[_Member, ...]:
    known = _MEMBERS.get(cls)
    if known is None:
        if not dataclasses.is_dataclass(cls):
            raise TypeError(f"{cls.__name__} is no dataclass")
        hints = typing.get_type_hints(cls)
        known = tuple(
            _Member(f.name, hints[f.name], type(None) in typing.get_args(hints[f.name]), f.metadata)
            for f in dataclasses.fields(cls)
        )
        _MEMBERS[cls] = known
    return known


def tag_of(cls: type) -> tuple[str, str] | None:
    """The tag member that a dataclass writes first, if it has one."""
    tag: tuple[str, str] | None = getattr(cls, "TAG", None)
    return tag


def encode(value: object) -> object:
    """The JSON value of a dataclass or of anything that may stand in one.

    Every member is written, also null ones: the payload digest covers them (isolation contract 3.3).
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        members: JsonObject = {}
        tag = tag_of(type(value))
        if tag is not None:
            members[tag[0]] = tag[1]
        for member in _members(type(value)):
            members[member.name] = encode(getattr(value, member.name))
        return members
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, bytes):
        return list(value)
    if isinstance(value, tuple | list):
        return [encode(v) for v in value]
    if isinstance(value, Mapping):
        return {str(k): encode(v) for k, v in value.items()}
    return value


def encode_object(value: object) -> JsonObject:
    """The JSON object of a dataclass.

    Raises:
        TypeError: the value is no dataclass.
    """
    encoded = encode(value)
    if not isinstance(encoded, dict):
        raise TypeError(f"{type(value).__name__} does not encode to an object")
    return encoded


_T = typing.TypeVar("_T")


def decode(cls: type[_T], value: object, where: str, *, strict: bool = True) -> _T:
    """Read a dataclass from a parsed JSON value.

    Args:
        cls: the dataclass.
        value: the parsed value.
        where: path for error texts.
        strict: refuse unknown members (requests); else ignore them (results of a newer peer).

    Raises:
        DocumentError: naming the member that is wrong; never quoting its value.
    """
    if not isinstance(value, dict):
        raise DocumentError(where, "must be an object")
    tag = tag_of(cls)
    known: set[str] = set()
    if tag is not None:
        known.add(tag[0])
        if value.get(tag[0]) != tag[1]:
            raise DocumentError(f"{where}.{tag[0]}", f"must be {tag[1]}")
    arguments: dict[str, object] = {}
    for member in _members(cls):
        known.add(member.name)
        path = f"{where}.{member.name}"
        if member.name not in value:
            if not member.nullable:
                raise DocumentError(path, "is missing")
            arguments[member.name] = None
        else:
            arguments[member.name] = _decode(member.hint, value[member.name], path, member.metadata, strict=strict)
    if strict and (unknown := sorted(set(value) - known)):
        raise DocumentError(f"{where}.{unknown[0]}", "is not a known field")
    return cls(**arguments)


def decode_tagged(variants: Mapping[str, type[_T]], key: str, value: object, where: str, *, strict: bool = True) -> _T:
    """Read the dataclass that the tag member ``key`` names.

    Raises:
        DocumentError: the tag is missing or unknown, or a member is wrong.
    """
    if not isinstance(value, dict):
        raise DocumentError(where, "must be an object")
    name = value.get(key)
    variant = variants.get(name) if isinstance(name, str) else None
    if variant is None:
        raise DocumentError(f"{where}.{key}", "is missing or unknown")
    return decode(variant, value, where, strict=strict)


def _decode(hint: object, value: object, path: str, bounds: Mapping[str, int], *, strict: bool) -> object:
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        return _decode_union(typing.get_args(hint), value, path, bounds, strict=strict)
    if origin is tuple:
        return _decode_tuple(typing.get_args(hint), value, path, bounds, strict=strict)
    if origin is Mapping:
        item = typing.get_args(hint)[1]
        if not isinstance(value, dict):
            raise DocumentError(path, "must be an object")
        return {str(k): _decode(item, v, f"{path}.{k}", bounds, strict=strict) for k, v in value.items()}
    if hint is object:
        return value
    if hint is str:
        return check_text(value, path, empty_ok=True)
    if hint is bool:
        if not isinstance(value, bool):
            raise DocumentError(path, "must be true or false")
        return value
    if hint is int:
        return check_integer(value, path, minimum=bounds.get("minimum", 0), maximum=bounds.get("maximum", U64_MAX))
    if hint is bytes:
        if not isinstance(value, list):
            raise DocumentError(path, "must be an array of bytes")
        return bytes(check_integer(v, path, maximum=255) for v in value)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        if not isinstance(value, str) or value not in set(hint):
            raise DocumentError(path, f"must be one of {', '.join(hint)}")
        return hint(value)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return decode(hint, value, path, strict=strict)
    raise TypeError(f"{path}: annotation {hint!r} is not supported")


def _decode_union(
    hints: tuple[object, ...], value: object, path: str, bounds: Mapping[str, int], *, strict: bool
) -> object:
    if value is None and type(None) in hints:
        return None
    choices = [h for h in hints if h is not type(None)]
    if len(choices) == 1:
        return _decode(choices[0], value, path, bounds, strict=strict)
    variants: dict[str, type] = {}
    key = ""
    for choice in choices:
        tag = tag_of(choice) if isinstance(choice, type) else None
        if tag is None or not isinstance(choice, type):
            raise TypeError(f"{path}: only tagged dataclasses may form a union")
        key = tag[0]
        variants[tag[1]] = choice
    return decode_tagged(variants, key, value, path, strict=strict)


def _decode_tuple(
    hints: tuple[object, ...], value: object, path: str, bounds: Mapping[str, int], *, strict: bool
) -> tuple[object, ...]:
    if not isinstance(value, list):
        raise DocumentError(path, "must be an array")
    if len(hints) == 2 and hints[1] is Ellipsis:
        return tuple(_decode(hints[0], v, f"{path}[{i}]", bounds, strict=strict) for i, v in enumerate(value))
    if len(value) != len(hints):
        raise DocumentError(path, f"must hold {len(hints)} values")
    return tuple(
        _decode(h, v, f"{path}[{i}]", bounds, strict=strict) for i, (h, v) in enumerate(zip(hints, value, strict=True))
    )
