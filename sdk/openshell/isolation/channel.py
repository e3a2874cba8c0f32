"""The physical connection under the Sandbox Protocol, as a client holds it."""

from __future__ import annotations

import asyncio

import grpc.aio

from openshell.isolation.endpoints import Transport, TransportTls


class PhysicalChannel:
    """One authenticated TLS connection with a gRPC channel on it; connects once and never reconnects.

    Attributes:
        generation: counter that tells this connection from earlier and later ones.
        closed: set once the physical connection is gone, for whatever reason.
        grpc: the channel to make stubs from.
    """

    generation: int
    closed: asyncio.Event
    grpc: grpc.aio.Channel

    @classmethod
    async def connect(cls, transport: Transport, tls: TransportTls, *, generation: int = 1) -> PhysicalChannel:
        """Connect, check the server's certificate and name, and offer the gRPC channel.

        Raises:
            TransportLostError: nothing answers, or the handshake failed or took longer than 5 s.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Cut the physical connection and release everything; idempotent."""
        raise NotImplementedError
