"""Envelopes of control requests and responses (isolation contract 3.3)."""

from __future__ import annotations

import hmac
import uuid
from dataclasses import dataclass, field

from openshell.isolation.canonical import EXEC_EXPIRY, payload_digest
from openshell.isolation.errors import DeniedError, DocumentError
from openshell.isolation.json_fields import I64_MAX, Fields, JsonObject, dump_json
from openshell.isolation.operations import (
    Exec,
    Request,
    Result,
    request_from_object,
    request_to_object,
    result_from_object,
    result_to_object,
)

MAX_REQUEST_ID_BYTES = 128
DIGEST_MISMATCH = "control request payload digest mismatch"


def new_request_id() -> str:
    """A fresh request id."""
    return str(uuid.uuid4())


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestEnvelope:
    """A request with its id and digest; sent again unchanged, it is a replay.

    Attributes:
        request_id: id of the request.
        payload_digest: hex SHA-256 over the request as transmitted.
        request: the JSON object as transmitted (may hold secrets).
        exec_expires_at_unix_ms: for exec only, Unix milliseconds after which the id is forgotten.
    """

    request_id: str
    payload_digest: str
    request: JsonObject = field(repr=False)
    exec_expires_at_unix_ms: int | None = None

    @classmethod
    def of(
        cls, request: Request, *, request_id: str | None = None, exec_expires_at_unix_ms: int | None = None
    ) -> RequestEnvelope:
        """Put a request in an envelope, with a fresh id unless one is given."""
        payload = request_to_object(request)
        return cls(
            request_id=request_id or new_request_id(),
            payload_digest=payload_digest(payload, exec_expires_at_unix_ms=exec_expires_at_unix_ms),
            request=payload,
            exec_expires_at_unix_ms=exec_expires_at_unix_ms,
        )

    def to_json(self) -> bytes:
        """The control frame's payload."""
        members: JsonObject = {"request_id": self.request_id}
        if self.exec_expires_at_unix_ms is not None:
            members[EXEC_EXPIRY] = self.exec_expires_at_unix_ms
        members["payload_digest"] = self.payload_digest
        members["request"] = self.request
        return dump_json(members)

    @classmethod
    def from_json(cls, data: bytes) -> RequestEnvelope:
        """Parse a control frame's payload; the request itself is read by :meth:`open`.

        Raises:
            DocumentError: naming the member that is wrong.
        """
        fields = Fields.parse(data, "envelope")
        request = fields.take("request")
        if not isinstance(request, dict):
            raise fields.error("request", "must be an object")
        expiry = fields.integer(EXEC_EXPIRY, maximum=I64_MAX) if fields.has(EXEC_EXPIRY) else None
        envelope = cls(
            request_id=fields.text("request_id", max_bytes=MAX_REQUEST_ID_BYTES),
            payload_digest=fields.text("payload_digest", max_bytes=64),
            request=request,
            exec_expires_at_unix_ms=expiry,
        )
        fields.finish()
        return envelope

    def open(self) -> Request:
        """Verify the digest and read the request.

        Raises:
            DeniedError: ``control request payload digest mismatch``.
            DocumentError: the request is unknown or a member is wrong.
        """
        digest = payload_digest(self.request, exec_expires_at_unix_ms=self.exec_expires_at_unix_ms)
        # Bytes, because a peer's text may not be ASCII.
        if not hmac.compare_digest(digest.encode(), self.payload_digest.encode("utf-8", "replace")):
            raise DeniedError(DIGEST_MISMATCH)
        request = request_from_object(self.request)
        if isinstance(request, Exec) != (self.exec_expires_at_unix_ms is not None):
            raise DocumentError(f"envelope.{EXEC_EXPIRY}", "belongs to exec, and to exec only")
        return request


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseEnvelope:
    """A result with the id of its request."""

    request_id: str
    response: Result

    def to_json(self) -> bytes:
        """The control frame's payload."""
        return dump_json({"request_id": self.request_id, "response": result_to_object(self.response)})

    @classmethod
    def from_json(cls, data: bytes) -> ResponseEnvelope:
        """Parse a control frame's payload.

        Raises:
            DocumentError: naming the member that is wrong.
        """
        fields = Fields.parse(data, "envelope")
        return cls(
            request_id=fields.text("request_id", max_bytes=MAX_REQUEST_ID_BYTES),
            response=result_from_object(fields.take("response")),
        )
