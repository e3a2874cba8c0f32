"""Stopping what does not want to stop, and what is left of sandboxes (compute-driver contract 3.6 and 3.8)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from scripted.compute_gateway import launch_authentication, ready
from scripted.inside import entry_of, launch_over
from scripted.retained import start, stop, stopped, wait_ready_again

from driver_docker.engine_connection import EngineConnection
from openshell.wire.compute.v1 import compute_driver_pb2 as pb

if TYPE_CHECKING:
    from scripted.driver_bench import DriverBench

SECRET_FILES = {"supervisor-auth.json", "boundary-bootstrap.json", "boundary-server.key", "retained-launch.json"}


async def test_field_report_08_a_workload_that_ignores_term_is_killed_after_the_grace(bench: DriverBench) -> None:
    async with bench.running(stop_grace_seconds=1) as (_, link):
        wanted = bench.sandbox()
        wanted.spec.log_level = "stubborn"
        await bench.launch(link, wanted)
        await stop(link, wanted.id)
        state = bench.container(wanted.id, "sandbox")["State"]
        assert (state["Status"], state["ExitCode"], state["OOMKilled"]) == ("exited", 137, False)
        assert await stopped(link, wanted.id)
        assert "Warning" not in {event.type for event in link.platform_events(wanted.id)}
        seen = len(link.events)
        await start(link, wanted.id, "g-2", launch_authentication(generation="g-2"))
        await wait_ready_again(link, wanted.id, seen)
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))


async def test_field_report_41_a_grace_longer_than_the_engine_clients_timeout_is_waited_out(
    bench: DriverBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench.running(stop_grace_seconds=3) as (_, link):
        wanted = bench.sandbox()
        wanted.spec.log_level = "stubborn"
        await bench.launch(link, wanted)
        # Of every request that names none of its own.
        defaults = (EngineConnection.ask.__kwdefaults__ or {}) | {"timeout_seconds": 2.0}
        monkeypatch.setattr(EngineConnection.ask, "__kwdefaults__", defaults)
        await stop(link, wanted.id)
        assert await stopped(link, wanted.id)
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))


async def test_field_report_20_and_27_the_engine_neither_restarts_nor_removes_by_itself(bench: DriverBench) -> None:
    async with bench.running() as (_, link):
        wanted = bench.sandbox()
        await bench.launch(link, wanted)
        for role in ("sandbox", "supervisor"):
            host = bench.container(wanted.id, role)["HostConfig"]
            assert (host["AutoRemove"], host["RestartPolicy"]["Name"]) == (False, "no")
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))


async def test_field_report_29_a_start_failure_leaves_neither_container_nor_secret(bench: DriverBench) -> None:
    async with bench.running() as (driver, link):
        wanted = bench.sandbox("exit-9.x")
        await bench.launch(link, wanted)
        await launch_over(entry_of(driver, wanted.id))
        assert bench.sandbox_left_over(wanted.id) == []
        left = {file.name for file in (driver.services.store.directory / wanted.id).iterdir()}
        assert not left & SECRET_FILES
        assert "record.json" in left
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))


@pytest.mark.slow
async def test_field_report_32_a_name_can_be_used_again_at_once_fifty_times(bench: DriverBench) -> None:
    async with bench.running() as (_, link):
        wanted = bench.sandbox("same-name")
        for _ in range(50):
            seen = len(link.events)
            await link.stub.CreateSandbox(pb.CreateSandboxRequest(sandbox=wanted))
            await wait_ready_again(link, wanted.id, seen)
            assert (await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))).deleted
        assert bench.sandbox_left_over(wanted.id) == []


async def test_a_restart_policy_set_from_outside_is_not_followed(bench: DriverBench) -> None:
    async with bench.running() as (driver, link):
        wanted = bench.sandbox()
        await bench.launch(link, wanted)
        workload = bench.container(wanted.id, "sandbox")["Id"]
        bench.client.update_container(workload, restart_policy={"Name": "always"})
        command = bench.client.exec_create(workload, ["/bin/sh", "-c", "kill -USR1 1"])["Id"]
        bench.client.exec_start(command)  # from inside: an end through the engine would count as asked for
        observed = await link.wait_reason(wanted.id, "ContainerExited")
        assert "code 7" in ready(observed).message, "the code of the run that ended (field report 26)"
        supervisor = bench.container(wanted.id, "supervisor")["Id"]
        bench.client.kill(supervisor, "SIGTERM")
        sandbox = driver.services.table.by_id(wanted.id)
        assert sandbox is not None
        async with asyncio.timeout(20):
            while not sandbox.has_event(supervisor, "destroy"):
                await sandbox.moved.wait()
        assert bench.container(wanted.id, "sandbox")["State"]["Status"] == "exited"
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))
