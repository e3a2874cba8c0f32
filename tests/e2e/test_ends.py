"""How a sandbox ends, told by the whole of it: runtime, supervisor, driver and gateway."""

from __future__ import annotations

import asyncio
import json
import signal
from typing import TYPE_CHECKING

import grpc
import pytest

from openshell.isolation.documents import AuthBundle
from openshell.verdicts import Component, KilledBy, Verdict, VerdictKind
from openshell.wire.v1 import openshell_pb2 as pb
from openshell.wire.v1 import openshell_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from scripted.stack import Stack

SLEEP = ["sleep", "1000"]
SUPERVISOR_EXITED = "ControlSupervisorExited"


def ready(sandbox: pb.Sandbox) -> pb.SandboxCondition:
    return next(item for item in sandbox.status.conditions if item.type == "Ready")


@pytest.mark.parametrize(
    ("code", "phase", "reason", "message"),
    [
        (0, pb.SANDBOX_PHASE_COMPLETED, "MainProcessCompleted", "Canonical main process completed successfully"),
        (3, pb.SANDBOX_PHASE_ERROR, "MainProcessFailed", "Canonical main process exited with status 3"),
    ],
)
async def test_the_end_of_the_main_process_is_the_end_of_the_sandbox(
    stack: Stack, code: int, phase: pb.SandboxPhase.ValueType, reason: str, message: str
) -> None:
    async with stack.removals("supervisor") as supervisor_removed:
        script = f"until [ -e /tmp/go ]; do sleep 0.05; done; exit {code}"
        sandbox = await stack.create("alpha", command=["sh", "-c", script])
        # What ends before the driver has seen it ready is a failed launch to the driver, and tells another story.
        await stack.until_event("alpha", lambda event: event.reason == "Started")
        (workload,) = stack.containers(sandbox, "sandbox")
        go = stack.engine.exec_create(workload["Id"], ["sh", "-c", ": > /tmp/go"])
        await asyncio.to_thread(stack.engine.exec_start, go["Id"])
        ended = await stack.until_phase("alpha", phase)
        assert (ready(ended).reason, ready(ended).message) == (reason, message)
        assert ended.status.exit_code == code
        await supervisor_removed()
    exits = json.loads(stack.driver_file(sandbox, "exits.json"))
    told = [Verdict.from_metadata(item["verdict"]) for item in exits]
    verdicts = {verdict.component: verdict for verdict in told if verdict is not None}
    follower = verdicts[Component.SUPERVISOR]
    assert (follower.kind, follower.exit_code, follower.is_failure) == (VerdictKind.FOLLOWED_WORKLOAD, 0, False)
    events = await stack.past_events("alpha")
    assert events
    assert SUPERVISOR_EXITED not in [event.reason for event in events]
    again = await stack.until_phase("alpha", phase)
    assert ready(again).reason == reason, "nothing that follows hides the end of the main process"
    await stack.delete("alpha")


async def test_a_supervisor_that_is_stopped_from_outside_is_named_with_its_signal(stack: Stack) -> None:
    async with stack.removals("supervisor") as supervisor_removed:
        sandbox = await stack.create("alpha", command=SLEEP)
        await stack.until_phase("alpha", pb.SANDBOX_PHASE_READY)
        (supervisor,) = stack.containers(sandbox, "supervisor")
        (workload,) = stack.containers(sandbox, "sandbox")
        await asyncio.to_thread(stack.engine.stop, supervisor["Id"])
        failed = await stack.until_phase("alpha", pb.SANDBOX_PHASE_ERROR)
        assert await supervisor_removed() == supervisor["Id"]
    assert ready(failed).reason == SUPERVISOR_EXITED
    for part in ("143", "SIGTERM", "ended by SIGTERM from outside"):
        assert part in ready(failed).message
    verdict = Verdict.from_metadata((await stack.verdict("alpha")).metadata)
    assert verdict is not None
    assert (verdict.exit_code, verdict.signal, verdict.killed_by) == (143, "SIGTERM", KilledBy.ENGINE_CLIENT)
    assert verdict.words == "ended by SIGTERM from outside"
    assert not stack.engine.inspect_container(workload["Id"])["State"]["Running"], "the driver stopped its workload"
    await stack.delete("alpha")


async def test_a_supervisor_that_gives_up_is_told_in_its_own_words(stack: Stack) -> None:
    sandbox = await stack.create("alpha", command=SLEEP)
    await stack.until_phase("alpha", pb.SANDBOX_PHASE_READY)
    bundle = AuthBundle.from_json(stack.driver_file(sandbox, "supervisor-auth.json"))
    async with grpc.aio.insecure_channel(stack.gateway_address) as channel:
        # Another instance takes the session over: the gateway rejects the first one for good.
        stub: pb_grpc.OpenShellAsyncStub = pb_grpc.OpenShellStub(channel)
        done = asyncio.Event()
        hello = pb.SupervisorHello(
            sandbox_id=sandbox.metadata.id, instance_id="99999999-9999-4999-8999-999999999999", connection_epoch=1
        )

        async def messages() -> AsyncIterator[pb.SupervisorMessage]:
            yield pb.SupervisorMessage(hello=hello)
            await done.wait()

        call = stub.ConnectSupervisor(messages(), metadata=[("authorization", f"Bearer {bundle.gateway_token}")])
        accepted = await anext(aiter(call))
        assert accepted.WhichOneof("payload") == "session_accepted"
        failed = await stack.until_phase("alpha", pb.SANDBOX_PHASE_ERROR)
        done.set()
        call.cancel()
    assert ready(failed).reason == SUPERVISOR_EXITED
    words = "the gateway refused the supervisor's session with ABORTED"
    assert words in ready(failed).message
    verdict = Verdict.from_metadata((await stack.verdict("alpha")).metadata)
    assert verdict is not None
    assert (verdict.kind, verdict.exit_code, verdict.words) == (VerdictKind.EXITED, 69, words)
    await stack.delete("alpha")


@pytest.mark.parametrize("killed", ["gateway", "driver"])
async def test_a_supervisor_lost_while_the_gateway_did_not_watch_is_told_once_when_it_does(
    stack: Stack, killed: str
) -> None:
    sandbox = await stack.create("alpha", command=SLEEP)
    await stack.until_event("alpha", lambda event: event.reason == "Started")
    await stack.until_phase("alpha", pb.SANDBOX_PHASE_READY)
    (supervisor,) = stack.containers(sandbox, "supervisor")
    async with stack.removals("supervisor") as supervisor_removed:
        await stack.end(killed, signal.SIGKILL)
        await asyncio.to_thread(stack.engine.kill, supervisor["Id"])
        if killed == "gateway":
            assert await supervisor_removed() == supervisor["Id"], "the driver has told it, to nobody"
            await stack.start_gateway()
            await stack.ready()
        else:
            await stack.start_driver()
    verdict = Verdict.from_metadata((await stack.verdict("alpha")).metadata)
    assert verdict is not None
    assert (verdict.exit_code, verdict.component) == (137, Component.SUPERVISOR)
    failed = await stack.until_phase("alpha", pb.SANDBOX_PHASE_ERROR)
    assert ready(failed).reason == SUPERVISOR_EXITED
    told = [event for event in await stack.past_events("alpha") if event.reason == SUPERVISOR_EXITED]
    assert len(told) == 1
    await stack.delete("alpha")
