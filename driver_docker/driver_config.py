"""The caller's `driver_config`: from a Struct to mounts and devices, every key taken or refused by name. Pure.

Schema of compute-driver contract 5.12. A Struct's numbers are doubles: integral ones are integers, whatever else is
refused where an integer is meant. JSON's null is taken for an absent key.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from driver_docker.errors import InvalidRequestError, PreconditionError
from driver_docker.mounts import (
    MAX_MOUNTS,
    BindRequest,
    ImageRequest,
    MountRequest,
    SelinuxLabel,
    TmpfsRequest,
    VolumeRequest,
    check_unique,
    checked_bind_source,
    checked_subpath,
    checked_target,
    checked_text,
    checked_tmpfs,
)
from driver_docker.quantities import exact_numbers

if TYPE_CHECKING:
    from google.protobuf import struct_pb2

_PREFIX: Final = "invalid docker driver_config: "
_VOLUME_NAME: Final = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{1,254}", re.ASCII)
_CDI_DEVICE: Final = re.compile(
    r"[A-Za-z][A-Za-z0-9_.-]*/[A-Za-z][A-Za-z0-9_.-]*=[A-Za-z0-9][A-Za-z0-9_.:-]*", re.ASCII
)
_MAX_TEXT_BYTES: Final = 4096
_MAX_CDI_DEVICES: Final = 128
_SELINUX: Final = {"shared": SelinuxLabel.SHARED, "private": SelinuxLabel.PRIVATE}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerConfig:
    """What the caller's `driver_config` asks for."""

    used: bool = False
    """Whether the caller sent one at all."""
    cdi_devices: tuple[str, ...] = ()
    mounts: tuple[MountRequest, ...] = ()


def decode_driver_config(struct: struct_pb2.Struct, *, allow: bool) -> CallerConfig:
    """Check and translate a `driver_config`.

    Args:
        struct: The block for this driver.
        allow: Whether callers may send one (`allow_driver_config`).

    Raises:
        PreconditionError: One was sent and is not allowed.
        InvalidRequestError: It does not fit the schema; the text starts with `invalid docker driver_config:`.
    """
    if not struct.fields:
        return CallerConfig()
    if not allow:
        raise PreconditionError(
            "template.driver_config is not allowed here: the operator has not set allow_driver_config",
            reason="ResourceAdmissionDenied",
        )
    try:
        table = _Table({key: exact_numbers(_plain(value), path=key) for key, value in struct.fields.items()}, path="")
        devices = _cdi_devices(table)
        mounts = tuple(_mount(_Table(item, path=path)) for path, item in table.items_of("mounts", most=MAX_MOUNTS))
        table.close()
        check_unique(mounts, path="mounts")
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{_PREFIX}{error.message}") from None
    return CallerConfig(used=True, cdi_devices=devices, mounts=mounts)


class _Table:
    """A mapping whose keys are taken one by one; what is left at `close` is unknown."""

    def __init__(self, value: object, *, path: str) -> None:
        if not isinstance(value, dict):
            raise InvalidRequestError(f"{path} must be a table")
        self._left: dict[str, Any] = {str(key): item for key, item in value.items()}
        self.path = path

    def place(self, key: str) -> str:
        """Where a key stands, for error texts."""
        return f"{self.path}.{key}" if self.path else key

    def text(self, key: str) -> str | None:
        value = self._left.pop(key, None)
        if value is not None and (not isinstance(value, str) or len(value.encode()) > _MAX_TEXT_BYTES):
            raise InvalidRequestError(f"{self.place(key)} must be text of at most {_MAX_TEXT_BYTES} bytes")
        return value

    def required(self, key: str) -> str:
        value = self.text(key)
        if value is None:
            raise InvalidRequestError(f"{self.place(key)} is missing")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        value = self._left.pop(key, None)
        if value is not None and not isinstance(value, bool):
            raise InvalidRequestError(f"{self.place(key)} must be true or false")
        return default if value is None else value

    def integer(self, key: str) -> int | None:
        value = self._left.pop(key, None)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            shown = f", not {value!r}" if isinstance(value, float) else ""
            raise InvalidRequestError(f"{self.place(key)} must be a whole number{shown}")
        return value

    def items_of(self, key: str, *, most: int) -> list[tuple[str, object]]:
        value = self._left.pop(key, None)
        if value is None:
            return []
        if not isinstance(value, list):
            raise InvalidRequestError(f"{self.place(key)} must be a list")
        if len(value) > most:
            raise InvalidRequestError(f"{self.place(key)} must hold at most {most} entries")
        return [(f"{self.place(key)}[{index}]", item) for index, item in enumerate(value)]

    def texts(self, key: str, *, most: int) -> tuple[str, ...]:
        found = []
        for path, item in self.items_of(key, most=most):
            if not isinstance(item, str) or len(item.encode()) > _MAX_TEXT_BYTES:
                raise InvalidRequestError(f"{path} must be text of at most {_MAX_TEXT_BYTES} bytes")
            found.append(checked_text(item, path=path))
        return tuple(found)

    def close(self) -> None:
        if self._left:
            key = min(self._left)
            shown = key if key.isprintable() else repr(key)
            raise InvalidRequestError(f"unknown key {self.place(shown[:64])}")


def _cdi_devices(table: _Table) -> tuple[str, ...]:
    devices = table.texts("cdi_devices", most=_MAX_CDI_DEVICES)
    for index, device in enumerate(devices):
        if not _CDI_DEVICE.fullmatch(device):
            raise InvalidRequestError(f"cdi_devices[{index}] must be vendor/class=name, such as nvidia.com/gpu=0")
        if device in devices[:index]:
            raise InvalidRequestError(f"cdi_devices[{index}] {device} is listed twice")
    return devices


def _mount(table: _Table) -> MountRequest:
    kind = table.required("type")
    target = checked_target(table.required("target"), path=table.place("target"))
    mount: MountRequest
    match kind:
        case "bind":
            mount = BindRequest(
                source=checked_bind_source(table.required("source"), path=table.place("source")),
                target=target,
                read_only=table.flag("read_only", default=True),
                selinux=_selinux(table),
            )
        case "volume":
            mount = VolumeRequest(
                source=_volume_name(table),
                target=target,
                read_only=table.flag("read_only", default=True),
                subpath=_subpath(table),
            )
        case "tmpfs":
            mount = checked_tmpfs(
                TmpfsRequest(
                    target=target,
                    options=table.texts("options", most=32),
                    size_bytes=table.integer("size_bytes"),
                    mode=table.integer("mode"),
                ),
                path=table.path,
            )
        case "image":
            mount = ImageRequest(
                source=checked_text(table.required("source"), path=table.place("source")), target=target
            )
            table.flag("read_only", default=True)
            _subpath(table)
        case _:
            raise InvalidRequestError(f"{table.place('type')} must be bind, volume, tmpfs or image")
    table.close()
    return mount


def _selinux(table: _Table) -> SelinuxLabel | None:
    label = table.text("selinux_label")
    if label is not None and label not in _SELINUX:
        raise InvalidRequestError(f"{table.place('selinux_label')} must be shared or private")
    return _SELINUX[label] if label is not None else None


def _volume_name(table: _Table) -> str:
    place = table.place("source")
    name = checked_text(table.required("source"), path=place)
    if not _VOLUME_NAME.fullmatch(name):
        raise InvalidRequestError(f"{place} must be the name of a volume: a letter or digit, then A-Z a-z 0-9 _ . -")
    return name


def _subpath(table: _Table) -> str:
    subpath = table.text("subpath")
    return "" if subpath is None else checked_subpath(subpath, path=table.place("subpath"))


def _plain(value: struct_pb2.Value) -> object:
    match value.WhichOneof("kind"):
        case "bool_value":
            return value.bool_value
        case "number_value":
            return value.number_value
        case "string_value":
            return value.string_value
        case "list_value":
            return [_plain(item) for item in value.list_value.values]
        case "struct_value":
            return {key: _plain(item) for key, item in value.struct_value.fields.items()}
        case _:
            return None
