"""Faults that were seen in the field and that need a whole driver to be seen, in both places.

Those that another test proves already are listed in docs/driver-coverage.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from typing import TYPE_CHECKING, Any, Final

import grpc
import pytest
from scripted.compute_gateway import ready
from scripted.engine_proxy import EngineProxy
from scripted.retained import refusal, stop, stopped

from openshell.wire.compute.v1 import compute_driver_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from scripted.deployment import Deployment, Served

pytestmark = pytest.mark.asyncio(loop_scope="module")

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING, GOAWAY, ACK = 4, 6, 7, 1
PINGS: Final = 40
WATCHES: Final = 500
WATCHES_AT_ONCE: Final = 50
SLACK: Final = 8
"""Threads and descriptors that a library may keep for later."""


async def settled_watches(served: Served) -> None:
    """Open and cancel many watches."""
    for _ in range(WATCHES // WATCHES_AT_ONCE):
        calls = [served.link.stub.WatchSandboxes(pb.WatchSandboxesRequest()) for _ in range(WATCHES_AT_ONCE)]
        await asyncio.gather(*(call.wait_for_connection() for call in calls))
        for call in calls:
            call.cancel()


async def test_field_report_03_ready_says_only_that_the_backend_is(served: Served) -> None:
    wanted = served.bench.sandbox()
    condition = ready(await served.bench.launch(served.link, wanted))
    assert (condition.status, condition.reason) == ("True", "BackendReady")
    served.bench.client.kill(served.bench.container(wanted.id, "supervisor")["Id"], "SIGKILL")
    told = ready(await served.link.wait_reason(wanted.id, "ControlSupervisorExited"))
    assert told.status == "False", "a workload that still runs makes nobody ready"
    await served.delete(wanted.id)


async def test_field_report_09_what_is_stopped_already_is_stopped_well(served: Served) -> None:
    wanted = served.bench.sandbox()
    await served.bench.launch(served.link, wanted)
    served.bench.client.kill(served.bench.container(wanted.id, "sandbox")["Id"], "SIGUSR1")
    await served.link.wait_reason(wanted.id, "ContainerExited")
    for _ in range(2):
        await stop(served.link, wanted.id)
        assert await stopped(served.link, wanted.id)
    await served.delete(wanted.id)


async def test_field_report_10_a_pause_is_no_end(served: Served) -> None:
    wanted = served.bench.sandbox()
    await served.bench.launch(served.link, wanted)
    workload = served.bench.container(wanted.id, "sandbox")["Id"]
    served.bench.client.pause(workload)
    told = ready(await served.link.wait_reason(wanted.id, "ContainerPaused"))
    assert (told.status, "paused" in told.message) == ("Unknown", True)
    seen = len(served.link.events)
    served.bench.client.unpause(workload)
    await served.link.wait(
        lambda e: e.sandbox.sandbox.id == wanted.id and any(e is each for _, each in served.link.events[seen:])
    )
    assert ready(await served.observed(wanted.id)).reason == "BackendReady"
    served.bench.client.pause(workload)
    await stop(served.link, wanted.id)
    assert await stopped(served.link, wanted.id)
    await served.delete(wanted.id)


async def test_field_report_11_a_child_that_the_kernel_killed_is_a_warning_and_no_end(served: Served) -> None:
    wanted = served.bench.sandbox()
    wanted.spec.template.resources.memory_limit = "32Mi"
    await served.bench.launch(served.link, wanted)
    workload, client = served.bench.container(wanted.id, "sandbox"), served.bench.client
    eater = ["/bin/busybox", "dd", "if=/dev/zero", "of=/dev/null", "bs=400M", "count=1"]
    run = client.exec_create(workload["Id"], eater)
    await asyncio.to_thread(client.exec_start, run["Id"])
    assert client.exec_inspect(run["Id"])["ExitCode"] == 137
    _, event = await served.link.wait(
        lambda e: e.platform_event.sandbox_id == wanted.id and e.platform_event.event.reason == "OutOfMemory"
    )
    assert event.platform_event.event.type == "Warning"
    assert ready(await served.observed(wanted.id)).reason == "BackendReady"
    assert served.bench.container(wanted.id, "sandbox")["State"]["StartedAt"] == workload["State"]["StartedAt"]
    await served.delete(wanted.id)


async def test_field_report_12_a_main_process_that_is_done_is_told_as_done(served: Served) -> None:
    wanted = served.bench.sandbox()
    await served.bench.launch(served.link, wanted)
    served.bench.client.kill(served.bench.container(wanted.id, "sandbox")["Id"], "SIGUSR2")
    told = ready(await served.link.wait_reason(wanted.id, "ContainerExited"))
    assert "completed with code 0" in told.message
    assert "Warning" not in {event.type for event in served.link.platform_events(wanted.id)}
    await served.delete(wanted.id)


async def test_field_report_25_answers_about_the_unknown_are_exact(served: Served) -> None:
    stub, unknown = served.link.stub, "3f2d8d0e-0000-4000-8000-000000000001"
    calls: dict[grpc.StatusCode, tuple[Callable[[], Awaitable[Any]], ...]] = {
        grpc.StatusCode.NOT_FOUND: (
            lambda: stub.GetSandbox(pb.GetSandboxRequest(sandbox_id=unknown)),
            lambda: stub.StopSandbox(pb.StopSandboxRequest(sandbox_id=unknown)),
            lambda: stub.StartSandbox(pb.StartSandboxRequest(sandbox_id=unknown, generation_id="g-1")),
            lambda: stub.GetSandbox(pb.GetSandboxRequest(name="nobody")),
        ),
        grpc.StatusCode.INVALID_ARGUMENT: (
            lambda: stub.GetSandbox(pb.GetSandboxRequest()),
            lambda: stub.DeleteSandbox(pb.DeleteSandboxRequest()),
        ),
    }
    for code, asked in calls.items():
        for ask in asked:
            assert (await refusal(ask()))[0] is code
    assert not (await stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=unknown))).deleted


async def test_field_report_57_a_peer_that_pings_often_is_not_sent_away(served: Served) -> None:
    """A peer of any make, down to its frames: an idle connection and many pings on it."""
    reader, writer = await asyncio.open_unix_connection(str(served.bench.folder / "s" / "d.sock"))
    try:
        writer.write(PREFACE + _frame(SETTINGS, b""))
        async with asyncio.timeout(30):
            for number in range(PINGS):  # one after the other: a refusal comes after the answer to the last one
                writer.write(_frame(PING, struct.pack(">Q", number)))
                while (frame := await _read_frame(reader)) != (PING, ACK):
                    assert frame[0] != GOAWAY
                    if frame == (SETTINGS, 0):
                        writer.write(_frame(SETTINGS, b"", flags=ACK))
    finally:
        writer.close()
        await writer.wait_closed()


def _frame(kind: int, body: bytes, *, flags: int = 0) -> bytes:
    return len(body).to_bytes(3, "big") + bytes((kind, flags)) + bytes(4) + body


async def _read_frame(reader: asyncio.StreamReader) -> tuple[int, int]:
    head = await reader.readexactly(9)
    await reader.readexactly(int.from_bytes(head[:3], "big"))
    return head[3], head[4]


async def test_field_report_58_watches_that_were_given_up_leave_nothing(served: Served) -> None:
    await settled_watches(served)  # what is kept for later is there after the first round
    threads, descriptors = served.threads(), served.descriptors()
    await settled_watches(served)
    wanted = served.bench.sandbox()
    await served.bench.launch(served.link, wanted)
    await served.delete(wanted.id)
    assert served.threads() <= threads + SLACK
    assert served.descriptors() <= descriptors + SLACK


async def test_field_report_76_a_list_bears_what_vanishes_meanwhile(served: Served) -> None:
    wanted = [served.bench.sandbox(f"many-{number}") for number in range(6)]
    for each in wanted:
        await served.link.stub.CreateSandbox(pb.CreateSandboxRequest(sandbox=each))
    for each in wanted:
        assert ready(await served.link.wait_ready(each.id)).reason == "BackendReady"
    deletions = asyncio.gather(*(served.delete(each.id) for each in wanted[1:]))
    while not deletions.done():
        listed = await served.listed()
        assert ready(listed[wanted[0].id]).reason == "BackendReady"
        for sandbox_id in listed:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await served.observed(sandbox_id)
    await deletions
    assert set(await served.listed()) & {each.id for each in wanted} == {wanted[0].id}
    await served.delete(wanted[0].id)


async def test_field_report_54_an_exit_that_no_event_told_is_found(deployment: Deployment, tmp_path: Path) -> None:
    """The connection that carries events takes in what the engine says and never passes it on."""
    async with (
        EngineProxy.between(tmp_path / "e.sock", deployment.bench.docker_host) as proxy,
        deployment.behind(proxy.address).serving(resync_interval_seconds=1.0) as served,
    ):
        wanted = served.bench.sandbox()
        await served.bench.launch(served.link, wanted)
        proxy.swallowed = b"/events"
        workload = served.bench.container(wanted.id, "sandbox")["Id"]
        served.bench.client.kill(workload, "SIGUSR1")
        await asyncio.to_thread(served.bench.client.wait, workload, timeout=20)
        assert "code 7" in ready(await served.link.wait_reason(wanted.id, "ContainerExited")).message
        await served.delete(wanted.id)
