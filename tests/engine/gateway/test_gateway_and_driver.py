"""A sandbox's life through the real gateway and the real driver."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from openshell.verdicts import KilledBy, Verdict, VerdictKind
from openshell.wire.v1 import openshell_pb2 as pb

if TYPE_CHECKING:
    from scripted.stack import Stack

SLEEP = ["sleep", "1000"]


def ready(sandbox: pb.Sandbox) -> pb.SandboxCondition:
    return next(item for item in sandbox.status.conditions if item.type == "Ready")


async def test_a_killed_supervisor_is_told_in_the_drivers_words(stack: Stack) -> None:
    sandbox = await stack.create("alpha", command=SLEEP)
    await stack.until_phase("alpha", pb.SANDBOX_PHASE_READY)
    (supervisor,) = stack.containers(sandbox, "supervisor")
    stack.engine.kill(supervisor["Id"], "SIGKILL")
    failed = await stack.until_phase("alpha", pb.SANDBOX_PHASE_ERROR)
    event = await stack.verdict("alpha")
    verdict = Verdict.from_metadata(event.metadata)
    assert verdict is not None
    assert (verdict.kind, verdict.exit_code, verdict.signal, verdict.killed_by) == (
        VerdictKind.KILLED_THROUGH_ENGINE, 137, "SIGKILL", KilledBy.ENGINE_CLIENT
    )  # fmt: skip
    assert ready(failed).reason == verdict.reason
    assert ready(failed).message == event.message
    assert "137" in event.message
    assert "SIGKILL" in event.message
    await stack.delete("alpha")


@pytest.mark.parametrize(
    ("code", "phase", "reason"),
    [(0, pb.SANDBOX_PHASE_COMPLETED, "MainProcessCompleted"), (3, pb.SANDBOX_PHASE_ERROR, "MainProcessFailed")],
)
async def test_the_end_of_the_main_process_is_no_fault_of_the_supervisor(
    stack: Stack, code: int, phase: pb.SandboxPhase.ValueType, reason: str
) -> None:
    await stack.create("alpha", command=["sh", "-c", f"exit {code}"])
    ended = await stack.until_phase("alpha", phase)
    assert (ready(ended).reason, ended.status.exit_code) == (reason, code)
    await stack.delete("alpha")


async def test_an_image_that_does_not_exist_is_an_error_with_a_reason(stack: Stack) -> None:
    await stack.create("alpha", template=pb.SandboxTemplate(image="openshell-local/no-such-image:1"))
    failed = await stack.until_phase("alpha", pb.SANDBOX_PHASE_ERROR)
    assert ready(failed).reason == "ImagePullFailed"
    assert "no-such-image" in ready(failed).message
    await stack.delete("alpha")


async def test_a_sandbox_outlives_a_killed_gateway(stack: Stack) -> None:
    sandbox = await stack.create("alpha", command=SLEEP)
    await stack.until_phase("alpha", pb.SANDBOX_PHASE_READY)
    (before,) = stack.containers(sandbox, "supervisor")
    assert await stack.end("gateway", signal.SIGKILL) == -signal.SIGKILL
    await stack.start_gateway()
    await stack.ready()
    again = await stack.until_phase("alpha", pb.SANDBOX_PHASE_READY)
    assert again.metadata.id == sandbox.metadata.id
    (after,) = stack.containers(sandbox, "supervisor")
    assert after["Id"] == before["Id"]
    await stack.delete("alpha")


async def test_a_sandbox_that_is_deleted_while_it_starts_leaves_nothing(stack: Stack) -> None:
    await stack.create("alpha", command=SLEEP)
    await stack.delete("alpha")
    await stack.create("alpha", command=SLEEP)
    await stack.until_phase("alpha", pb.SANDBOX_PHASE_READY)
    await stack.delete("alpha")
