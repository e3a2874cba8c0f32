"""What only gateways of the older contract generation know: two time fields and one RPC (compute-driver contract 1.3).

The current messages reserve the numbers of those fields, so they travel as unknown fields: the older gateway reads
them, the current one skips them, and each finds its own time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import grpc
from google.protobuf import empty_pb2

if TYPE_CHECKING:
    from datetime import datetime

    from openshell.wire.compute.v1 import compute_driver_pb2 as pb

SERVICE: Final = "openshell.compute.v1.ComputeDriver"
LISTENER_RPC: Final = "GetGatewayListenerRequirements"

_LAST_TRANSITION_TIME: Final = 5
_TIMESTAMP_MS: Final = 1
_VARINT: Final = 0
_LENGTH_DELIMITED: Final = 2
_MAX_VARINT: Final = 2**64


def add_transition_time(condition: pb.DriverCondition, time: datetime) -> None:
    """Add `string last_transition_time = 5`, RFC 3339 in UTC to the second."""
    text = time.strftime("%Y-%m-%dT%H:%M:%SZ").encode("ascii")
    condition.MergeFromString(_tag(_LAST_TRANSITION_TIME, _LENGTH_DELIMITED) + _varint(len(text)) + text)


def add_timestamp_milliseconds(event: pb.DriverPlatformEvent, time: datetime) -> None:
    """Add `int64 timestamp_ms = 1`, milliseconds since 1970."""
    milliseconds = int(time.timestamp() * 1000)
    event.MergeFromString(_tag(_TIMESTAMP_MS, _VARINT) + _varint(milliseconds % _MAX_VARINT))


def listener_requirements_handler() -> grpc.GenericRpcHandler:
    """Answer `GetGatewayListenerRequirements` with none: the supervisor shares the host's network.

    Request and response are no part of the current contract; both are empty messages here (compute-driver contract
    3.13).
    """

    async def answer(request: empty_pb2.Empty, context: grpc.aio.ServicerContext[Any, Any]) -> empty_pb2.Empty:
        return empty_pb2.Empty()

    method = grpc.unary_unary_rpc_method_handler(
        answer,
        request_deserializer=empty_pb2.Empty.FromString,
        response_serializer=empty_pb2.Empty.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(SERVICE, {LISTENER_RPC: method})


def _tag(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
