"""Error details of a status, as the contract's clients read them (public-api contract 2.2).

The three messages are small and fixed, so they are written by hand instead of adding a dependency for them:
`google.rpc.Status` {code 1, message 2, details 3 Any}, `ErrorInfo` {reason 1, domain 2, metadata 3},
`BadRequest` {field_violations 1 {field 1, description 2}}.
"""

from __future__ import annotations

from google.protobuf import any_pb2

from gateway_embedded.errors import GatewayError, InvalidRequestError

DETAILS_KEY = "grpc-status-details-bin"
"""Trailing metadata key of the serialised `google.rpc.Status`."""

ERROR_DOMAIN = "openshell.nvidia.com"
"""Domain of every reason of this API."""

_LENGTH_DELIMITED = 2


def encode(error: GatewayError) -> bytes:
    """The serialised status of an error; its code and message equal the outer ones, else clients ignore it."""
    details = [_any("google.rpc.ErrorInfo", _error_info(error))]
    if isinstance(error, InvalidRequestError) and error.field:
        violation = _text(1, error.field) + _text(2, error.public_message)
        details.append(_any("google.rpc.BadRequest", _bytes(1, violation)))
    status = b"\x08" + _varint(int(error.status)) + _text(2, error.public_message)
    return status + b"".join(_bytes(3, detail) for detail in details)


def _error_info(error: GatewayError) -> bytes:
    entries = (_bytes(3, _text(1, key) + _text(2, value)) for key, value in sorted(error.facts.items()))
    return _text(1, error.reason) + _text(2, ERROR_DOMAIN) + b"".join(entries)


def _any(type_name: str, value: bytes) -> bytes:
    return any_pb2.Any(type_url=f"type.googleapis.com/{type_name}", value=value).SerializeToString()


def _text(number: int, text: str) -> bytes:
    return _bytes(number, text.encode())


def _bytes(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | _LENGTH_DELIMITED) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
