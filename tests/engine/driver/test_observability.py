"""Metrics, health and word to systemd of a driver that works."""

from __future__ import annotations

import asyncio
import json
import socket
import urllib.request
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from scripted import driver_process
from scripted.compute_gateway import ComputeGateway

from driver_docker.serving_health import COMPUTE_DRIVER
from openshell.wire.compute.v1 import compute_driver_pb2 as pb

if TYPE_CHECKING:
    from scripted.driver_bench import DriverBench

    from driver_docker.serve import Driver


def scraped(driver: Driver) -> dict[str, float]:
    """The samples of a driver's metrics by name and labels, as they are served."""
    with urllib.request.urlopen(f"http://127.0.0.1:{driver.metrics_port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(number) for name, _, number in (line.rpartition(" ") for line in lines if line[0] != "#")}


async def test_metrics_and_health_tell_what_happened(bench: DriverBench) -> None:
    async with bench.running(metrics_port=0) as (driver, link):
        steady, lost = bench.sandbox(), bench.sandbox("exit-9.x")
        for sandbox in (steady, lost):
            await bench.launch(link, sandbox)
        async with grpc.aio.insecure_channel(link.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=COMPUTE_DRIVER))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        samples = await asyncio.to_thread(scraped, driver)
        assert samples['openshell_driver_rpcs_total{method="CreateSandbox",status="OK"}'] == 2
        assert samples['openshell_driver_launches_total{result="ready"}'] == 1
        assert samples['openshell_driver_launches_total{result="failed"}'] == 1
        assert samples['openshell_driver_sandboxes{phase="active"}'] == 1
        assert samples['openshell_driver_exits_total{component="supervisor",kind="exited"}'] == 1
        assert samples['openshell_driver_engine_calls_total{call="start_container",result="ok"}'] >= 2
        assert samples["openshell_driver_watch_readers"] == 1
        assert samples["openshell_driver_engine_events_connected"] == 1
        for sandbox in (steady, lost):
            await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=sandbox.id))


async def test_no_port_is_opened_unless_one_is_configured(bench: DriverBench) -> None:
    async with bench.running() as (driver, _):
        assert driver.metrics_port is None


async def test_systemd_hears_ready_and_stopping_and_logs_carry_ids_and_trace(bench: DriverBench) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(bench.folder / "notify"))
        listener.settimeout(30)
        process = await driver_process.spawn(
            driver_process.flags(bench), {"NOTIFY_SOCKET": str(bench.folder / "notify")}
        )
        reading = asyncio.create_task(process.communicate())
        try:
            assert (await asyncio.to_thread(listener.recv, 4096)).startswith(b"READY=1\n")
            async with ComputeGateway(f"unix:{driver_process.socket_of(bench)}") as link:
                wanted = bench.sandbox()
                await link.stub.CreateSandbox(
                    pb.CreateSandboxRequest(sandbox=wanted),
                    metadata=(("traceparent", f"00-{trace}-00f067aa0ba902b7-01"),),
                )
                await link.wait_ready(wanted.id)
                await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))
            process.terminate()
            assert (await asyncio.to_thread(listener.recv, 4096)).startswith(b"STOPPING=1\n")
            _, err = await asyncio.wait_for(reading, 10)
        finally:
            if process.returncode is None:
                process.kill()
                await reading
    assert process.returncode == 0
    lines = [json.loads(line) for line in err.decode().splitlines()]
    (ready,) = [line for line in lines if line["event"] == "sandbox ready"]
    assert (ready["sandbox_id"], ready["generation"], ready["trace_id"]) == (wanted.id, "g-1", trace)
