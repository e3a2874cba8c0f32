"""StartSandbox over the socket, on the real engine (compute-driver contract 3.7 and 5.9)."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from scripted.compute_gateway import SECRET, launch_authentication, ready
from scripted.inside import entry_of, launch_over
from scripted.retained import read_text, refusal, start, stop, stopped, wait_ready_again

from openshell.isolation.documents import BoundaryBootstrap, LaunchAuthentication, RuntimeDescriptor
from openshell.wire.compute.v1 import compute_driver_pb2 as pb

if TYPE_CHECKING:
    from scripted.driver_bench import DriverBench

CODE = grpc.StatusCode
BOOTSTRAP = "/.openshell/channel/sandbox/bootstrap.json"
DESCRIPTOR = "/.openshell/supervisor/runtime-descriptor.json"
AUTH = "/.openshell/supervisor/auth.json"


def _rotated(wanted: pb.DriverSandbox, **changes: Any) -> LaunchAuthentication:
    """Newer credentials of the same session."""
    launch = LaunchAuthentication.from_json(wanted.spec.launch_authentication)
    bundle = replace(launch.supervisor, session_rotation=2, auth_epoch=2, **changes)
    return replace(launch, supervisor=bundle, supervisor_json=b"")


async def test_a_stopped_sandbox_starts_again_with_new_credentials(bench: DriverBench) -> None:
    async with bench.running() as (driver, link):
        wanted = bench.sandbox("again")
        wanted.spec.environment["MINE"] = "kept"
        wanted.spec.log_level = "debug"
        await bench.launch(link, wanted)
        before = bench.container(wanted.id, "sandbox")
        old = bench.container(wanted.id, "supervisor")
        await stop(link, wanted.id)
        launch = launch_authentication(generation="g-2")
        seen = len(link.events)
        await start(link, wanted.id, "g-2", launch)
        await wait_ready_again(link, wanted.id, seen)

        after, supervisor = bench.container(wanted.id, "sandbox"), bench.container(wanted.id, "supervisor")
        assert after["Id"] == before["Id"], "the container and its writable layer are kept"
        assert after["State"]["StartedAt"] > before["State"]["StartedAt"]
        assert supervisor["Id"] != old["Id"]
        assert [entry for entry in supervisor["Config"]["Env"] if "LOG_LEVEL" in entry] == ["OPENSHELL_LOG_LEVEL=debug"]
        bootstrap = BoundaryBootstrap.from_json(read_text(bench.client, after["Id"], BOOTSTRAP))
        descriptor = RuntimeDescriptor.from_json(read_text(bench.client, supervisor["Id"], DESCRIPTOR))
        assert (bootstrap.generation, descriptor.generation) == ("g-2", "g-2")
        assert bootstrap.session_id == descriptor.session_id == launch.supervisor.session_id
        assert bootstrap.outer_fence == descriptor.outer_fence
        assert bootstrap.child_env == {"MINE": "kept"}
        assert read_text(bench.client, supervisor["Id"], AUTH) == launch.supervisor_json
        record = driver.services.table.by_id(wanted.id)
        assert record is not None
        assert (record.record.generation, record.record.start_generation) == ("g-2", "g-2")
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))


async def test_a_start_without_credentials_uses_those_of_the_last_launch(bench: DriverBench) -> None:
    async with bench.running() as (_, link):
        wanted = bench.sandbox()
        await bench.launch(link, wanted)
        await stop(link, wanted.id)
        seen = len(link.events)
        await start(link, wanted.id, "g-2", None)
        await wait_ready_again(link, wanted.id, seen)
        supervisor = bench.container(wanted.id, "supervisor")["Id"]
        launch = LaunchAuthentication.from_json(wanted.spec.launch_authentication)
        assert read_text(bench.client, supervisor, AUTH) == launch.supervisor_json
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))


async def test_a_start_without_credentials_is_refused_where_the_last_ones_cannot_be_used(bench: DriverBench) -> None:
    async with bench.running() as (driver, link):
        wanted = bench.sandbox()
        await bench.launch(link, wanted)
        await stop(link, wanted.id)
        folder = driver.services.store.directory / wanted.id
        kept = (folder / "supervisor-auth.json").read_bytes()
        expired = replace(
            LaunchAuthentication.from_json(wanted.spec.launch_authentication).supervisor, gateway_expires_at=1
        )
        (folder / "supervisor-auth.json").write_bytes(expired.to_json())
        code, text = await refusal(start(link, wanted.id, "g-2", None))
        assert (code, "expired" in text) == (CODE.FAILED_PRECONDITION, True)
        (folder / "supervisor-auth.json").unlink()
        code, text = await refusal(start(link, wanted.id, "g-2", None))
        assert (code, "supervisor-auth.json" in text) == (CODE.FAILED_PRECONDITION, True)
        (folder / "supervisor-auth.json").write_bytes(b'{"gateway_token": "' + SECRET.encode() + b'"}')
        code, text = await refusal(start(link, wanted.id, "g-2", None))
        assert (code, "damaged" in text) == (CODE.FAILED_PRECONDITION, True)
        assert SECRET not in text
        assert await stopped(link, wanted.id), "a refused start changes nothing"
        (folder / "supervisor-auth.json").write_bytes(kept)
        seen = len(link.events)
        await start(link, wanted.id, "g-2", None)
        await wait_ready_again(link, wanted.id, seen)
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))


@pytest.mark.parametrize("generation", ["", "A", "g_1", "g.1", "x" * 65, "g 1", "ä"])
async def test_a_generation_that_is_none_is_refused(bench: DriverBench, generation: str) -> None:
    async with bench.running() as (_, link):
        wanted = bench.sandbox()
        await bench.launch(link, wanted)
        await stop(link, wanted.id)
        code, text = await refusal(start(link, wanted.id, generation, launch_authentication()))
        assert (code, "generation_id" in text) == (CODE.INVALID_ARGUMENT, True)
        assert await stopped(link, wanted.id)
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))


async def test_garbled_credentials_are_refused_and_not_quoted(bench: DriverBench) -> None:
    async with bench.running() as (_, link):
        wanted = bench.sandbox()
        await bench.launch(link, wanted)
        await stop(link, wanted.id)
        request = pb.StartSandboxRequest(
            sandbox_id=wanted.id, generation_id="g-2", launch_authentication=b'{"supervisor": {"x": "s3cr3t"}}'
        )
        code, text = await refusal(link.stub.StartSandbox(request))
        assert (code, "launch_authentication" in text, "s3cr3t" in text) == (CODE.INVALID_ARGUMENT, True, False)
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))


async def test_a_running_sandbox_adopts_the_first_generation_and_refuses_another(bench: DriverBench) -> None:
    async with bench.running() as (_, link):
        wanted = bench.sandbox()
        await bench.launch(link, wanted)
        both = [bench.container(wanted.id, role)["State"]["StartedAt"] for role in ("sandbox", "supervisor")]
        same = LaunchAuthentication.from_json(wanted.spec.launch_authentication)
        await start(link, wanted.id, "first", same)
        await start(link, wanted.id, "first", None)
        code, text = await refusal(start(link, wanted.id, "second", same))
        assert (code, "first" in text, "second" in text) == (CODE.FAILED_PRECONDITION, True, True)
        assert both == [bench.container(wanted.id, role)["State"]["StartedAt"] for role in ("sandbox", "supervisor")]
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))


async def test_new_credentials_for_a_running_sandbox_replace_its_supervisor_alone(bench: DriverBench) -> None:
    async with bench.running() as (_, link):
        wanted = bench.sandbox()
        await bench.launch(link, wanted)
        workload, old = bench.container(wanted.id, "sandbox"), bench.container(wanted.id, "supervisor")
        launch = _rotated(wanted)
        for _ in range(2):  # the second is a retry
            seen = len(link.events)
            await start(link, wanted.id, "first", launch)
            await wait_ready_again(link, wanted.id, seen)
        new = bench.container(wanted.id, "supervisor")
        assert new["Id"] != old["Id"]
        assert read_text(bench.client, new["Id"], AUTH) == launch.supervisor_json
        now = bench.container(wanted.id, "sandbox")
        assert (now["Id"], now["State"]["StartedAt"]) == (workload["Id"], workload["State"]["StartedAt"])
        assert "Warning" not in {event.type for event in link.platform_events(wanted.id)}
        foreign = launch_authentication(generation="g-9")
        code, text = await refusal(start(link, wanted.id, "first", foreign))
        assert (code, "g-9" in text) == (CODE.FAILED_PRECONDITION, True)
        assert bench.container(wanted.id, "supervisor")["Id"] == new["Id"], "a supervisor that works is not given up"
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))


async def test_retries_of_a_start_do_it_once(bench: DriverBench) -> None:
    async with bench.running() as (_, link):
        wanted = bench.sandbox()
        await bench.launch(link, wanted)
        await stop(link, wanted.id)
        launch = launch_authentication(generation="g-2")
        seen = len(link.events)
        await asyncio.gather(*(start(link, wanted.id, "g-2", launch) for _ in range(3)))
        code, _ = await refusal(start(link, wanted.id, "g-3", launch))
        assert code is CODE.FAILED_PRECONDITION
        await wait_ready_again(link, wanted.id, seen)
        started = [event for event in link.platform_events(wanted.id) if event.reason == "Started"]
        assert len(started) == 2, "one for the create, one for the start"
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))


async def test_field_report_06_a_start_from_exited_143_clears_the_old_error(bench: DriverBench) -> None:
    async with bench.running() as (_, link):
        wanted = bench.sandbox()
        await bench.launch(link, wanted)
        bench.client.kill(bench.container(wanted.id, "sandbox")["Id"], "SIGTERM")
        observed = await link.wait_reason(wanted.id, "ContainerRuntimeRestart")
        assert "143" in ready(observed).message
        seen = len(link.events)
        await start(link, wanted.id, "g-2", launch_authentication(generation="g-2"))
        observed = await wait_ready_again(link, wanted.id, seen, failed_before=True)
        got = await link.stub.GetSandbox(pb.GetSandboxRequest(sandbox_id=wanted.id))
        assert got.sandbox == observed
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))


async def test_a_start_after_a_lost_supervisor_makes_both_run_again(bench: DriverBench) -> None:
    async with bench.running() as (_, link):
        wanted = bench.sandbox()
        await bench.launch(link, wanted)
        bench.client.kill(bench.container(wanted.id, "supervisor")["Id"], "SIGKILL")
        await link.wait_reason(wanted.id, "ControlSupervisorExited")
        seen = len(link.events)
        await start(link, wanted.id, "g-2", launch_authentication(generation="g-2"))
        await wait_ready_again(link, wanted.id, seen, failed_before=True)
        assert bench.container(wanted.id, "supervisor")["State"]["Running"]
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))


async def test_a_failed_start_keeps_the_workload_and_can_be_repeated(bench: DriverBench) -> None:
    async with bench.running() as (driver, link):
        wanted = bench.sandbox("failing")
        await bench.launch(link, wanted)
        await stop(link, wanted.id)
        good = driver.services.config
        driver.services.config = good.model_copy(update={"supervisor_image": bench.images.bare})
        seen = len(link.events)
        await start(link, wanted.id, "g-2", launch_authentication(generation="g-2"))
        _, event = await link.wait(lambda e: e.platform_event.event.type == "Warning")
        assert event.platform_event.event.reason == "ControlSupervisorStartFailed"
        await link.wait_reason(wanted.id, "ControlSupervisorStartFailed")
        await launch_over(entry_of(driver, wanted.id))
        assert len(bench.sandbox_left_over(wanted.id)) == 3, "the workload and its volumes are kept"
        driver.services.config = good
        seen = len(link.events)
        await start(link, wanted.id, "g-2", launch_authentication(generation="g-2"))
        await wait_ready_again(link, wanted.id, seen, failed_before=True)
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))


async def test_a_failed_launch_cannot_be_started_but_created_again(bench: DriverBench) -> None:
    async with bench.running() as (_, link):
        wanted = bench.sandbox("exit-9.x")
        await bench.launch(link, wanted)
        code, text = await refusal(start(link, wanted.id, "g-2", launch_authentication()))
        assert (code, "create it again" in text) == (CODE.NOT_FOUND, True)
        wanted.name = "steady"
        wanted.spec.ClearField("sandbox_token")
        seen = len(link.events)
        await link.stub.CreateSandbox(pb.CreateSandboxRequest(sandbox=wanted))
        await wait_ready_again(link, wanted.id, seen, failed_before=True)
        code, _ = await refusal(link.stub.CreateSandbox(pb.CreateSandboxRequest(sandbox=wanted)))
        assert code is CODE.ALREADY_EXISTS
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))


async def test_a_sandbox_stopped_while_it_was_provisioned_can_be_started(bench: DriverBench) -> None:
    async with bench.running() as (_, link):
        wanted = bench.sandbox("steady")
        await link.stub.CreateSandbox(pb.CreateSandboxRequest(sandbox=wanted))
        await link.wait(lambda e: e.platform_event.event.reason == "Created")
        await stop(link, wanted.id)
        assert await stopped(link, wanted.id)
        seen = len(link.events)
        await start(link, wanted.id, "g-2", launch_authentication(generation="g-2"))
        await wait_ready_again(link, wanted.id, seen)
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))


async def test_a_stop_ends_a_start_that_does_not_become_ready(bench: DriverBench) -> None:
    async with bench.running() as (_, link):
        wanted = bench.sandbox("steady")
        await bench.launch(link, wanted)
        await stop(link, wanted.id)
        await start(link, wanted.id, "g-2", launch_authentication(generation="g-2"))
        await stop(link, wanted.id)
        assert await stopped(link, wanted.id)
        assert "Warning" not in {event.type for event in link.platform_events(wanted.id)}
        assert (await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))).deleted


async def test_a_runtime_identity_is_never_expected_of_this_driver(bench: DriverBench) -> None:
    async with bench.running() as (_, link):
        wanted = bench.sandbox()
        await bench.launch(link, wanted)
        request = pb.StartSandboxRequest(sandbox_id=wanted.id, generation_id="g", expected_runtime_identity="other")
        code, _ = await refusal(link.stub.StartSandbox(request))
        assert code is CODE.FAILED_PRECONDITION
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))


async def test_the_real_sandbox_runtime_listens_again_after_a_stop_and_after_a_kill(
    bench: DriverBench, runtime_image: str
) -> None:
    async with bench.running(sandbox_runtime_image=runtime_image, compatibility="warn") as (_, link):
        wanted = bench.sandbox()
        await bench.launch(link, wanted)
        workload = bench.container(wanted.id, "sandbox")["Id"]
        await asyncio.to_thread(_listened, bench, workload, 1)
        await stop(link, wanted.id)
        for number in (2, 3):
            seen, generation = len(link.events), f"g-{number}"
            await start(link, wanted.id, generation, launch_authentication(generation=generation))
            await wait_ready_again(link, wanted.id, seen, failed_before=number == 3)
            await asyncio.to_thread(_listened, bench, workload, number)
            if number == 2:  # its socket is left behind this time
                bench.client.kill(workload, "SIGKILL")
                await link.wait_reason(wanted.id, "ContainerRuntimeRestart")
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))


def _listened(bench: DriverBench, workload: str, times: int) -> None:
    """Return once the runtime has said for the n-th time that it listens."""
    for _ in range(200):  # its log is all that another process shows
        if bench.client.logs(workload).count(b'"Listening"') >= times:
            return
        time.sleep(0.05)
    raise AssertionError(bench.client.logs(workload))
