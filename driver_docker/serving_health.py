"""grpc.health.v1: alive as a whole, ready by whether the engine's events are being read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from grpc_health.v1 import health, health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

if TYPE_CHECKING:
    import grpc

COMPUTE_DRIVER: Final = "openshell.compute.v1.ComputeDriver"
"""The service whose health says whether sandboxes can be launched and observed now; the empty name: the process."""


class ServingHealth:
    """Answers health checks of one server."""

    def __init__(self) -> None:
        self._servicer = health.aio.HealthServicer()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Offer health checks on a server."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def engine_events(self, connected: bool) -> None:
        """Note whether the engine's events are being read."""
        told = health_pb2.HealthCheckResponse
        await self._servicer.set(COMPUTE_DRIVER, told.SERVING if connected else told.NOT_SERVING)

    async def ending(self) -> None:
        """Say NOT_SERVING from now on."""
        await self._servicer.enter_graceful_shutdown()
