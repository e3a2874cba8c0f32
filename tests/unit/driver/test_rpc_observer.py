"""What surrounds every RPC, over a real server: counts by method and code, and the caller's trace in the log."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from driver_docker.metrics import Metrics
from driver_docker.rpc_observer import METHODS, RpcObserver, trace_of
from driver_docker.serving_health import COMPUTE_DRIVER, ServingHealth
from openshell.wire.compute.v1 import compute_driver_pb2 as pb
from openshell.wire.compute.v1 import compute_driver_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADER = f"00-{TRACE}-{SPAN}-01"


class Service(pb_grpc.ComputeDriverServicer):
    """Answers, refuses, breaks and waits; keeps what the log would carry."""

    def __init__(self) -> None:
        self.bound: list[dict[str, Any]] = []
        self.later: asyncio.Task[dict[str, Any]] | None = None

    async def EnsureWorkspace(self, request: Any, context: Any) -> pb.EnsureWorkspaceResponse:
        async def background() -> dict[str, Any]:
            return structlog.contextvars.get_contextvars()

        self.bound.append(structlog.contextvars.get_contextvars())
        self.later = asyncio.create_task(background())
        return pb.EnsureWorkspaceResponse()

    async def GetSandbox(self, request: Any, context: Any) -> pb.GetSandboxResponse:
        await context.abort(grpc.StatusCode.NOT_FOUND, "none")
        raise AssertionError

    async def ListSandboxes(self, request: Any, context: Any) -> pb.ListSandboxesResponse:
        raise RuntimeError("broken")

    async def WatchSandboxes(self, request: Any, context: Any) -> None:  # type: ignore[override]
        await context.write(pb.WatchSandboxesEvent())
        await asyncio.Event().wait()


def make_service() -> Service:
    """Without the methods that no test calls."""
    made: Service = Service()  # type: ignore[abstract]
    return made


@asynccontextmanager
async def served(folder: Path, metrics: Metrics, service: Service, health: ServingHealth) -> AsyncIterator[Any]:
    server = grpc.aio.server(interceptors=(RpcObserver(metrics),))
    pb_grpc.add_ComputeDriverServicer_to_server(service, server)
    health.add_to(server)
    address = f"unix:{folder}/s"
    server.add_insecure_port(address)
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        yield channel
    await server.stop(None)


def count(metrics: Metrics, method: str, status: str) -> float | None:
    return metrics.registry.get_sample_value("openshell_driver_rpcs_total", {"method": method, "status": status})


async def test_rpcs_are_counted_by_method_and_code(tmp_path: Path) -> None:
    metrics, service = Metrics(), make_service()
    async with served(tmp_path, metrics, service, ServingHealth()) as channel:
        stub: Any = pb_grpc.ComputeDriverStub(channel)
        await stub.EnsureWorkspace(pb.EnsureWorkspaceRequest())
        for call in (stub.GetSandbox(pb.GetSandboxRequest()), stub.ListSandboxes(pb.ListSandboxesRequest())):
            with pytest.raises(grpc.aio.AioRpcError):
                await call
        watch = stub.WatchSandboxes(pb.WatchSandboxesRequest())
        await watch.read()
        watch.cancel()
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        unknown = channel.unary_unary("/other.Service/Secret")
        with pytest.raises(grpc.aio.AioRpcError):
            await unknown(b"")
    assert count(metrics, "EnsureWorkspace", "OK") == 1
    assert count(metrics, "GetSandbox", "NOT_FOUND") == 1
    assert count(metrics, "ListSandboxes", "UNKNOWN") == 1
    assert count(metrics, "WatchSandboxes", "CANCELLED") == 1
    assert count(metrics, "other", "OK") == 1
    methods = {
        sample.labels["method"]
        for family in metrics.registry.collect()
        for sample in family.samples
        if "method" in sample.labels
    }
    assert methods <= METHODS | {"other"}


async def test_the_callers_trace_is_in_the_log_also_of_what_goes_on_later(tmp_path: Path) -> None:
    service = make_service()
    async with served(tmp_path, Metrics(), service, ServingHealth()) as channel:
        stub: Any = pb_grpc.ComputeDriverStub(channel)
        await stub.EnsureWorkspace(pb.EnsureWorkspaceRequest(), metadata=(("traceparent", HEADER),))
        assert service.later is not None
        later = await service.later
        await stub.EnsureWorkspace(pb.EnsureWorkspaceRequest(), metadata=(("traceparent", "nonsense"),))
        await service.later
    expected = {"trace_id": TRACE, "parent_span_id": SPAN}
    assert service.bound == [expected, {}]
    assert later == expected


@pytest.mark.parametrize(
    ("header", "valid"),
    [
        (HEADER, True),
        (HEADER.replace("00-", "01-", 1) + "-later", True),
        (None, False),
        ("", False),
        (HEADER.upper(), False),
        (HEADER.replace("00-", "ff-", 1), False),
        (f"00-{'0' * 32}-{SPAN}-01", False),
        (f"00-{TRACE}-{'0' * 16}-01", False),
        (HEADER + "\n", False),
    ],
)
def test_only_well_formed_traces_reach_the_log(header: str | None, valid: bool) -> None:
    assert trace_of(header) == ({"trace_id": TRACE, "parent_span_id": SPAN} if valid else {})


async def test_health_follows_the_engine_and_ends_before_the_server(tmp_path: Path) -> None:
    health = ServingHealth()
    async with served(tmp_path, Metrics(), make_service(), health) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def status(service: str = COMPUTE_DRIVER) -> Any:
            return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status

        serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        assert await status("") == serving
        await health.engine_events(True)
        assert await status() == serving
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=COMPUTE_DRIVER))
        assert (await watch.read()).status == serving
        await health.engine_events(False)
        assert (await watch.read()).status == not_serving
        assert await status() == not_serving
        assert await status("") == serving
        watch.cancel()
        await health.engine_events(True)
        await health.ending()
        assert (await status(), await status("")) == (not_serving, not_serving)
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await status("nobody")
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
