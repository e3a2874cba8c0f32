"""Frames of the Sandbox Protocol (isolation contract 3.2): pure encoders, and one incremental decoder.

A stream starts with control frames; what follows the response (process I/O, DNS, raw bytes) depends on the operation,
so the decoder is asked for the kind of frame that is due.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

from openshell.isolation.errors import FramingError
from openshell.isolation.json_codec import decode, encode
from openshell.isolation.json_fields import dump_json, parse_json
from openshell.isolation.operations import ExitStatus

MAX_CONTROL_BYTES = 1_048_576
MAX_PROCESS_BYTES = 65_536
MAX_DNS_BYTES = 262_144
MAX_CONTROL_RPC_BYTES = 65_536
MAX_CHUNK_BYTES = 65_536 - 64
"""Largest ``data`` of a chunk that we send; the message around it stays within 64 KiB."""

_CONTROL = struct.Struct(">I")
_PROCESS = struct.Struct(">BI")
_DNS = struct.Struct(">BQI")


class IoChannel(IntEnum):
    """Channels of process I/O frames."""

    STDIN = 0
    STDOUT = 1
    STDERR = 2
    EXIT_STATUS = 3
    STDIN_CLOSED = 4
    TCP_DECISION = 5


class DnsKind(IntEnum):
    """Kinds of DNS frames: a query goes to the supervisor, a result to the backend."""

    QUERY = 5
    RESULT = 6


class TcpDenial(StrEnum):
    """Why an intercepted connection is denied."""

    POLICY_DENIED = "PolicyDenied"
    IDENTITY_UNAVAILABLE = "IdentityUnavailable"
    INVALID_DESTINATION = "InvalidDestination"
    RESOURCE_EXHAUSTED = "ResourceExhausted"
    MEDIATION_UNAVAILABLE = "MediationUnavailable"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFrame:
    """One process I/O frame."""

    channel: IoChannel
    payload: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class DnsFrame:
    """One DNS frame; the payload is JSON."""

    kind: DnsKind
    stream_id: int
    payload: bytes = field(repr=False)


def encode_control(payload: bytes) -> bytes:
    """A control frame around UTF-8 JSON.

    Raises:
        FramingError: it is larger than 1 MiB.
    """
    if len(payload) > MAX_CONTROL_BYTES:
        raise FramingError(f"control frame of {len(payload)} bytes exceeds {MAX_CONTROL_BYTES}")
    return _CONTROL.pack(len(payload)) + payload


def encode_process(frame: ProcessFrame) -> bytes:
    """A process I/O frame.

    Raises:
        FramingError: the payload is larger than 64 KiB, or a closing frame is not empty.
    """
    _check_process(frame.channel, len(frame.payload))
    return _PROCESS.pack(frame.channel, len(frame.payload)) + frame.payload


def encode_output(channel: IoChannel, data: bytes) -> Iterator[bytes]:
    """As many process I/O frames as the data needs."""
    for start in range(0, len(data), MAX_PROCESS_BYTES):
        yield encode_process(ProcessFrame(channel=channel, payload=data[start : start + MAX_PROCESS_BYTES]))


def encode_dns(frame: DnsFrame) -> bytes:
    """A DNS frame.

    Raises:
        FramingError: the payload is larger than 256 KiB or the stream id does not fit.
    """
    if len(frame.payload) > MAX_DNS_BYTES:
        raise FramingError(f"DNS frame of {len(frame.payload)} bytes exceeds {MAX_DNS_BYTES}")
    if not 0 <= frame.stream_id < 2**64:
        raise FramingError("DNS stream id does not fit in 64 bits")
    return _DNS.pack(frame.kind, frame.stream_id, len(frame.payload)) + frame.payload


def encode_exit_status(status: ExitStatus) -> bytes:
    """The exit status frame that ends a process's output."""
    return encode_process(ProcessFrame(channel=IoChannel.EXIT_STATUS, payload=dump_json(encode(status))))


def decode_exit_status(payload: bytes) -> ExitStatus:
    """The exit status in a frame's payload.

    Raises:
        DocumentError: it is not one.
    """
    return decode(ExitStatus, parse_json(payload, "exit_status"), "exit_status")


def encode_tcp_decision(denial: TcpDenial | None) -> bytes:
    """The decision frame: ``"RelayReady"`` for none, else ``{"Denied": reason}``."""
    value: object = "RelayReady" if denial is None else {"Denied": denial.value}
    return encode_process(ProcessFrame(channel=IoChannel.TCP_DECISION, payload=dump_json(value)))


def decode_tcp_decision(payload: bytes) -> TcpDenial | None:
    """The decision in a frame's payload: none when the relay is ready. Everything malformed denies."""
    try:
        value = parse_json(payload, "decision")
    except Exception:
        return TcpDenial.MEDIATION_UNAVAILABLE
    if value == "RelayReady":
        return None
    reason = value["Denied"] if isinstance(value, dict) and set(value) == {"Denied"} else None
    if isinstance(reason, str) and reason in set(TcpDenial):
        return TcpDenial(reason)
    return TcpDenial.MEDIATION_UNAVAILABLE


def chunks(data: bytes) -> Iterator[bytes]:
    """Cut a frame into pieces that fit one stream message."""
    for start in range(0, len(data), MAX_CHUNK_BYTES):
        yield data[start : start + MAX_CHUNK_BYTES]


class FrameBuffer:
    """Bytes of one stream in, frames out. A length beyond its limit is refused before its payload is awaited."""

    __slots__ = ("_data",)

    def __init__(self) -> None:
        self._data = bytearray()

    def __len__(self) -> int:
        return len(self._data)

    def feed(self, data: bytes) -> None:
        """Add bytes as they arrived."""
        self._data += data

    def take_control(self) -> bytes | None:
        """The payload of the next control frame, or none while it is incomplete.

        Raises:
            FramingError: it is larger than 1 MiB.
        """
        header = self._header(_CONTROL)
        if header is None:
            return None
        (length,) = header
        if length > MAX_CONTROL_BYTES:
            raise FramingError(f"control frame of {length} bytes exceeds {MAX_CONTROL_BYTES}")
        return self._payload(_CONTROL.size, length)

    def take_process(self) -> ProcessFrame | None:
        """The next process I/O frame, or none while it is incomplete.

        Raises:
            FramingError: unknown channel, or larger than its limit.
        """
        header = self._header(_PROCESS)
        if header is None:
            return None
        number, length = header
        try:
            channel = IoChannel(number)
        except ValueError:
            raise FramingError(f"process I/O channel {number} is unknown") from None
        _check_process(channel, length)
        payload = self._payload(_PROCESS.size, length)
        return None if payload is None else ProcessFrame(channel=channel, payload=payload)

    def take_dns(self) -> DnsFrame | None:
        """The next DNS frame, or none while it is incomplete.

        Raises:
            FramingError: unknown kind, or larger than 256 KiB.
        """
        header = self._header(_DNS)
        if header is None:
            return None
        number, stream_id, length = header
        try:
            kind = DnsKind(number)
        except ValueError:
            raise FramingError(f"DNS frame kind {number} is unknown") from None
        if length > MAX_DNS_BYTES:
            raise FramingError(f"DNS frame of {length} bytes exceeds {MAX_DNS_BYTES}")
        payload = self._payload(_DNS.size, length)
        return None if payload is None else DnsFrame(kind=kind, stream_id=stream_id, payload=payload)

    def take_raw(self) -> bytes:
        """Whatever is buffered, for streams that carry raw bytes from here on."""
        data = bytes(self._data)
        self._data.clear()
        return data

    def _header(self, layout: struct.Struct) -> tuple[int, ...] | None:
        if len(self._data) < layout.size:
            return None
        return layout.unpack_from(self._data)

    def _payload(self, start: int, length: int) -> bytes | None:
        end = start + length
        if len(self._data) < end:
            return None
        payload = bytes(self._data[start:end])
        del self._data[:end]
        return payload


def _check_process(channel: IoChannel, length: int) -> None:
    if length > MAX_PROCESS_BYTES:
        raise FramingError(f"process I/O frame of {length} bytes exceeds {MAX_PROCESS_BYTES}")
    if channel is IoChannel.STDIN_CLOSED and length:
        raise FramingError("the frame that closes stdin must be empty")
