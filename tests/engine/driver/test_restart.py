"""A driver that is ended or killed, and what the next one makes of it."""

from __future__ import annotations

import asyncio
import json
import signal
from datetime import UTC
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from scripted import driver_process
from scripted.compute_gateway import ComputeGateway, ready

from openshell.verdicts import Verdict, VerdictKind
from openshell.wire.compute.v1 import compute_driver_pb2 as pb
from openshell.wire.compute.v1 import compute_driver_pb2_grpc

if TYPE_CHECKING:
    from scripted.driver_bench import DriverBench


async def _observed(link: ComputeGateway, sandbox_id: str) -> pb.DriverSandbox:
    got = await link.stub.GetSandbox(pb.GetSandboxRequest(sandbox_id=sandbox_id), wait_for_ready=True)
    observed: pb.DriverSandbox = got.sandbox
    return observed


async def test_sigterm_ends_the_driver_and_keeps_the_sandboxes(bench: DriverBench) -> None:
    address = f"unix:{driver_process.socket_of(bench)}"
    async with driver_process.serving(bench) as process, ComputeGateway(address) as link:
        wanted = bench.sandbox()
        await bench.launch(link, wanted)
        containers = [bench.container(wanted.id, role)["Id"] for role in ("sandbox", "supervisor")]
        begun = asyncio.get_running_loop().time()
        assert await driver_process.end(process) == 0
        assert asyncio.get_running_loop().time() - begun < 5
    assert not driver_process.socket_of(bench).exists()
    assert list(driver_process.socket_of(bench).parent.iterdir()) == []
    async with driver_process.serving(bench) as process, ComputeGateway(address) as link:
        assert ready(await _observed(link, wanted.id)).reason == "BackendReady"
        running = [bench.container(wanted.id, role) for role in ("sandbox", "supervisor")]
        assert [entry["Id"] for entry in running] == containers
        assert all(entry["State"]["Running"] for entry in running)
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))
        assert await driver_process.end(process, signal.SIGINT) == 0
    assert bench.left_over() == []
    assert not (bench.folder / "state").exists()


async def test_a_killed_driver_adopts_what_runs_and_judges_what_ended_meanwhile(bench: DriverBench) -> None:
    address = f"unix:{driver_process.socket_of(bench)}"
    async with driver_process.serving(bench) as process, ComputeGateway(address) as link:
        kept, lost, failed = bench.sandbox("kept"), bench.sandbox("late-6.lost"), bench.sandbox("exit-9.x")
        for sandbox in (kept, lost, failed):
            await bench.launch(link, sandbox)
        await driver_process.kill(process)
    supervisor = bench.container(lost.id, "supervisor")["Id"]
    bench.client.kill(supervisor, "SIGUSR1")
    await asyncio.to_thread(bench.client.wait, supervisor, timeout=20)
    async with driver_process.serving(bench) as process, ComputeGateway(address) as link:
        observed = await link.wait_reason(lost.id, "ControlSupervisorExited")
        assert "code 6" in ready(observed).message
        assert "gateway not reachable" in ready(observed).message
        assert ready(await _observed(link, kept.id)).reason == "BackendReady"
        remembered = ready(await _observed(link, failed.id))
        assert remembered.reason == "ControlSupervisorStartFailed"
        assert "code 9" in remembered.message
        bench.client.kill(bench.container(kept.id, "supervisor")["Id"], "SIGKILL")
        _, event = await link.wait(lambda e: e.platform_event.sandbox_id == kept.id)
        verdict = Verdict.from_metadata(event.platform_event.event.metadata)
        assert verdict is not None
        assert verdict.kind is VerdictKind.KILLED_THROUGH_ENGINE
        for sandbox in (kept, lost, failed):
            answer = await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=sandbox.id))
            assert answer.deleted
        assert await driver_process.end(process) == 0
    assert bench.left_over() == []


async def test_a_verdict_that_nobody_watched_for_reaches_the_gateway_once_when_it_is_back(bench: DriverBench) -> None:
    address = f"unix:{driver_process.socket_of(bench)}"
    wanted = await driver_process.launched_and_killed(bench)
    supervisor = bench.container(wanted.id, "supervisor")["Id"]
    bench.client.kill(supervisor, "SIGKILL")
    await asyncio.to_thread(bench.client.wait, supervisor, timeout=20)
    async with driver_process.serving(bench) as process:
        async with grpc.aio.insecure_channel(address) as channel:
            # A gateway that is not back yet, and a driver that has told what it found: the workload is stopped after.
            stub: Any = compute_driver_pb2_grpc.ComputeDriverStub(channel)
            await asyncio.to_thread(bench.client.wait, bench.container(wanted.id, "sandbox")["Id"], timeout=30)
            observed = await stub.GetSandbox(pb.GetSandboxRequest(sandbox_id=wanted.id), wait_for_ready=True)
            assert ready(observed.sandbox).reason == "ControlSupervisorExited"
        told = []
        for _ in range(2):
            async with ComputeGateway(address) as link:
                await link.wait(lambda e: e.sandbox.sandbox.id == wanted.id)
                told.append([seen.platform_event.event for _, seen in link.events if seen.HasField("platform_event")])
        ((event,), again) = told
        verdict = Verdict.from_metadata(event.metadata)
        assert verdict is not None
        assert (verdict.exit_code, event.type, event.reason) == (137, "Warning", "ControlSupervisorExited")
        assert event.event_time.ToDatetime(UTC) == verdict.finished_at
        assert again == []
        async with ComputeGateway(address) as link:
            await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))
        assert await driver_process.end(process) == 0
    assert bench.left_over() == []


@pytest.mark.parametrize("moment", range(8))
async def test_a_driver_killed_at_any_moment_of_a_launch_loses_and_leaks_nothing(
    bench: DriverBench, moment: int
) -> None:
    address = f"unix:{driver_process.socket_of(bench)}"
    async with driver_process.serving(bench) as process, ComputeGateway(address) as link:
        wanted = bench.sandbox()
        create = asyncio.create_task(_create(link, wanted))
        await asyncio.sleep(moment * 0.08)  # any moment will do: none may lose or leak anything
        await driver_process.kill(process)
        accepted = await create
    async with driver_process.serving(bench) as process, ComputeGateway(address) as link:
        listed = await link.stub.ListSandboxes(pb.ListSandboxesRequest(), wait_for_ready=True)
        known = {entry.id: ready(entry) for entry in listed.sandboxes}
        if accepted:
            assert wanted.id in known, "an accepted sandbox is never forgotten"
        for sandbox_id, condition in known.items():
            if condition.reason == "BackendReady":
                assert bench.container(sandbox_id, "supervisor")["State"]["Running"]
            else:
                assert "the driver ended" in condition.message
                assert bench.sandbox_left_over(sandbox_id) == []
            await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=sandbox_id))
        assert await driver_process.end(process) == 0
    assert bench.left_over() == []
    assert not (bench.folder / "state").exists()


async def _create(link: ComputeGateway, wanted: pb.DriverSandbox) -> bool:
    try:
        await link.stub.CreateSandbox(pb.CreateSandboxRequest(sandbox=wanted))
    except grpc.aio.AioRpcError:
        return False
    return True


async def test_a_driver_killed_in_a_delete_finishes_it_the_next_time(bench: DriverBench) -> None:
    address = f"unix:{driver_process.socket_of(bench)}"
    for moment in range(3):
        async with driver_process.serving(bench) as process, ComputeGateway(address) as link:
            wanted = bench.sandbox()
            await bench.launch(link, wanted)
            delete = asyncio.ensure_future(link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id)))
            await link.wait(lambda e: e.sandbox.sandbox.status.deleting)
            await asyncio.sleep(moment * 0.05)
            await driver_process.kill(process)
            await asyncio.gather(delete, return_exceptions=True)
        async with driver_process.serving(bench) as process, ComputeGateway(address) as link:
            listed = await link.stub.ListSandboxes(pb.ListSandboxesRequest(), wait_for_ready=True)
            for entry in listed.sandboxes:
                # Killed before the intent was written: the sandbox is as it was, and can be deleted.
                await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=entry.id))
            assert await driver_process.end(process) == 0
        assert bench.left_over() == []


async def test_sigterm_during_a_launch_leaves_a_remembered_failure_and_no_container(bench: DriverBench) -> None:
    address = f"unix:{driver_process.socket_of(bench)}"
    async with driver_process.serving(bench) as process, ComputeGateway(address) as link:
        wanted = bench.sandbox("never")
        await link.stub.CreateSandbox(pb.CreateSandboxRequest(sandbox=wanted))
        await link.wait(lambda e: e.platform_event.event.reason == "Created")
        assert await driver_process.end(process) == 0
    assert bench.left_over() == []
    async with driver_process.serving(bench) as process, ComputeGateway(address) as link:
        assert "the driver ended" in ready(await _observed(link, wanted.id)).message
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))
        assert await driver_process.end(process) == 0
    assert not (bench.folder / "state").exists()


async def test_things_of_another_driver_are_left_alone(bench: DriverBench) -> None:
    labels = {
        "openshell.ai/managed-by": "openshell",
        "openshell.ai/sandbox-namespace": bench.namespace,
        "openshell.ai/sandbox-id": "foreign",
        "openshell.ai/isolation-role": "supervisor",
    }
    foreign = bench.client.create_container(bench.images.workload, "/bin/sh", labels=labels)["Id"]
    async with driver_process.serving(bench) as process:
        assert await driver_process.end(process) == 0
    assert bench.client.inspect_container(foreign)["State"]["Status"] == "created"
    bench.client.remove_container(foreign)


async def test_field_report_53_a_restart_over_an_exited_sandbox_starts_and_tells_nothing(bench: DriverBench) -> None:
    address = f"unix:{driver_process.socket_of(bench)}"
    async with driver_process.serving(bench) as process, ComputeGateway(address) as link:
        wanted, lost = bench.sandbox("ended"), bench.sandbox("late-6.lost")
        for sandbox in (wanted, lost):
            await bench.launch(link, sandbox)
        bench.client.kill(bench.container(wanted.id, "sandbox")["Id"], "SIGUSR1")
        bench.client.kill(bench.container(lost.id, "supervisor")["Id"], "SIGUSR1")
        told = [await link.wait_reason(wanted.id, "ContainerExited")]
        told.append(await link.wait_reason(lost.id, "ControlSupervisorExited"))
        await asyncio.to_thread(bench.client.wait, bench.container(lost.id, "sandbox")["Id"], timeout=20)
        await driver_process.kill(process)
    started = [bench.container(each.id, "sandbox")["State"]["StartedAt"] for each in (wanted, lost)]
    async with driver_process.serving(bench) as process, ComputeGateway(address) as link:
        for _ in range(2):
            assert [await _observed(link, each.id) for each in (wanted, lost)] == told
        assert started == [bench.container(each.id, "sandbox")["State"]["StartedAt"] for each in (wanted, lost)]
        assert link.platform_events(wanted.id) + link.platform_events(lost.id) == []
        namespace = bench.folder / "state" / bench.namespace
        for each in (wanted, lost):
            exits = json.loads((namespace / each.id / "exits.json").read_bytes())
            assert len([entry for entry in exits if entry["message"] == ready(told[each is lost]).message]) == 1
            await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=each.id))
        assert await driver_process.end(process) == 0


async def test_a_supervisor_that_is_gone_without_a_trace_is_made_again(bench: DriverBench) -> None:
    address = f"unix:{driver_process.socket_of(bench)}"
    wanted = await driver_process.launched_and_killed(bench)
    workload = bench.container(wanted.id, "sandbox")
    bench.client.remove_container(bench.container(wanted.id, "supervisor")["Id"], force=True)
    async with driver_process.serving(bench) as process, ComputeGateway(address) as link:
        await link.wait_reason(wanted.id, "BackendReady")
        assert bench.container(wanted.id, "supervisor")["State"]["Running"]
        now = bench.container(wanted.id, "sandbox")
        assert (now["Id"], now["State"]["StartedAt"]) == (workload["Id"], workload["State"]["StartedAt"])
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))
        assert await driver_process.end(process) == 0


async def test_a_sandbox_whose_record_cannot_be_read_runs_on_and_is_adopted_once_it_can(bench: DriverBench) -> None:
    address = f"unix:{driver_process.socket_of(bench)}"
    async with driver_process.serving(bench) as process, ComputeGateway(address) as link:
        wanted = bench.sandbox()
        await bench.launch(link, wanted)
        assert await driver_process.end(process) == 0
    record = bench.folder / "state" / bench.namespace / wanted.id / "record.json"
    told = json.loads(record.read_bytes())
    record.write_text(json.dumps(told | {"version": 2}))
    ids = [bench.container(wanted.id, role)["Id"] for role in ("sandbox", "supervisor")]
    async with driver_process.serving(bench) as process, ComputeGateway(address) as link:
        for call in (
            link.stub.GetSandbox(pb.GetSandboxRequest(sandbox_id=wanted.id), wait_for_ready=True),
            link.stub.StopSandbox(pb.StopSandboxRequest(sandbox_id=wanted.id)),
        ):
            with pytest.raises(
                grpc.aio.AioRpcError, match=r"record\.json cannot be read: it is of version 2"
            ) as refused:
                await call
            assert refused.value.code() is grpc.StatusCode.INTERNAL
        with pytest.raises(grpc.aio.AioRpcError) as taken:
            await link.stub.CreateSandbox(pb.CreateSandboxRequest(sandbox=wanted))
        assert taken.value.code() is grpc.StatusCode.ALREADY_EXISTS
        assert not (await link.stub.ListSandboxes(pb.ListSandboxesRequest())).sandboxes
        assert await driver_process.end(process) == 0
    record.write_text(json.dumps(told))
    async with driver_process.serving(bench) as process, ComputeGateway(address) as link:
        assert ready(await _observed(link, wanted.id)).reason == "BackendReady"
        running = [bench.container(wanted.id, role) for role in ("sandbox", "supervisor")]
        assert [entry["Id"] for entry in running] == ids
        assert all(entry["State"]["Running"] for entry in running)
        record.write_text("{")
        await driver_process.kill(process)
    async with driver_process.serving(bench) as process, ComputeGateway(address) as link:
        deleted = await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id), wait_for_ready=True)
        assert deleted.deleted
        with pytest.raises(grpc.aio.AioRpcError) as gone:
            await _observed(link, wanted.id)
        assert gone.value.code() is grpc.StatusCode.NOT_FOUND
        assert await driver_process.end(process) == 0
    assert bench.left_over() == []
