"""The gRPC status codes as an enum of our own, so that errors can carry one without importing grpc."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grpc import StatusCode as GrpcStatusCode


class StatusCode(IntEnum):
    """The 17 status codes of gRPC, with their numbers on the wire."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16

    @property
    def grpc(self) -> GrpcStatusCode:
        """The same code as grpc's own enum; imports grpc on first use."""
        from grpc import StatusCode as GrpcStatusCode

        return GrpcStatusCode[self.name]

    @classmethod
    def from_grpc(cls, code: GrpcStatusCode) -> StatusCode:
        """Our code for one of grpc's."""
        return cls[code.name]
