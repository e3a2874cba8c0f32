"""What the driver says about ends that really happened, on a real engine, over its real socket."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from scripted.compute_gateway import SECRET, ready

from devtools.images.layout import SUPERVISOR_ENTRY, Role
from devtools.images.variants import not_executable, without_binary
from openshell.verdicts import Category, KilledBy, Stage, Verdict, VerdictKind

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from devtools.images.layout import ImageRecipe
    from openshell.wire.compute.v1 import compute_driver_pb2 as pb

    from .conftest import Drivers, Sandboxes


def verdict_of(event: pb.DriverPlatformEvent) -> Verdict:
    """The verdict in an event, which the event's own fields must agree with."""
    verdict = Verdict.from_metadata(event.metadata)
    assert verdict is not None
    assert (event.type, event.reason, event.message) == ("Warning", verdict.reason, verdict.message)
    assert event.message
    assert not event.message.endswith(":")
    assert verdict.finished_at is not None or verdict.kind is VerdictKind.COULD_NOT_RUN
    return verdict


def visible_pid(sandboxes: Sandboxes, container: str) -> int:
    """The main process of a container as this machine sees it."""
    pid = int(sandboxes.client.inspect_container(container)["State"]["Pid"])
    if container not in Path(f"/proc/{pid}/cgroup").read_text("utf-8"):
        pytest.skip("the engine's processes are not visible here")
    return pid


async def end_of_supervisor(sandboxes: Sandboxes, sandbox_id: str) -> Verdict:
    """The verdict on a supervisor that was ready: event, condition and the workload's stop must agree."""
    verdict = verdict_of(await sandboxes.exit_event(sandbox_id, "supervisor"))
    observed = await sandboxes.gateway.wait_reason(sandbox_id, verdict.reason)
    assert (ready(observed).status, ready(observed).message) == ("False", verdict.message)
    workload = sandboxes.container(sandbox_id, "sandbox")
    assert sandboxes.client.wait(workload, timeout=30)["StatusCode"] in {137, 143}
    return verdict


@pytest.mark.parametrize(
    ("name", "kind", "code", "reason"),
    [
        ("late-0", VerdictKind.ENDED_UNASKED, 0, "ControlSupervisorExited"),
        ("late-3", VerdictKind.EXITED, 3, "ControlSupervisorExited"),
        ("late-78", VerdictKind.EXITED, 78, "WorkspaceValidationFailed"),
        ("late-127", VerdictKind.EXITED, 127, "ControlSupervisorExited"),
        ("late-139", VerdictKind.SIGNALED, 139, "ControlSupervisorExited"),
    ],
)
async def test_a_supervisor_that_exits_by_itself_is_quoted(
    sandboxes: Sandboxes, name: str, kind: VerdictKind, code: int, reason: str
) -> None:
    sandbox_id = await sandboxes.launch(name)
    sandboxes.client.kill(sandboxes.container(sandbox_id, "supervisor"), signal="SIGUSR1")

    verdict = await end_of_supervisor(sandboxes, sandbox_id)

    assert (verdict.kind, verdict.exit_code, verdict.reason) == (kind, code, reason)
    assert (verdict.words, verdict.stage, verdict.category) == ("gave up", Stage.ATTACH, Category.CONFIGURATION)
    assert f"code {code}" in verdict.message


@pytest.mark.parametrize(
    ("name", "code", "reason", "words"),
    [
        ("early-0", 0, "ControlSupervisorStartFailed", "gave up"),
        ("early-3", 3, "ControlSupervisorStartFailed", "gave up"),
        ("early-78", 78, "WorkspaceValidationFailed", "gave up"),
        ("forge-3", 3, "ControlSupervisorStartFailed", ""),
        ("leak-3", 3, "ControlSupervisorStartFailed", "rejected [redacted]"),
    ],
)
async def test_a_supervisor_that_exits_before_it_is_ready_failed_to_start(
    sandboxes: Sandboxes, name: str, code: int, reason: str, words: str
) -> None:
    sandbox_id = await sandboxes.launch(name)

    event = await sandboxes.exit_event(sandbox_id, "supervisor")

    verdict = verdict_of(event)
    assert (verdict.exit_code, verdict.reason, verdict.words) == (code, reason, words)
    observed = await sandboxes.gateway.wait_reason(sandbox_id, reason)
    assert ready(observed).message == verdict.message
    assert SECRET[:20] not in str(event)


async def test_a_supervisor_killed_through_the_engine_is_told_from_one_killed_on_the_host(sandboxes: Sandboxes) -> None:
    through_engine = await sandboxes.launch("steady-1")
    sandboxes.client.kill(sandboxes.container(through_engine, "supervisor"), signal="SIGKILL")
    verdict = await end_of_supervisor(sandboxes, through_engine)
    assert (verdict.kind, verdict.killed_by) == (VerdictKind.KILLED_THROUGH_ENGINE, KilledBy.ENGINE_CLIENT)
    assert (verdict.exit_code, verdict.signal) == (137, "SIGKILL")

    on_host = await sandboxes.launch("steady-2")
    container = sandboxes.container(on_host, "supervisor")
    os.kill(visible_pid(sandboxes, container), signal.SIGKILL)
    verdict = await end_of_supervisor(sandboxes, on_host)
    assert (verdict.kind, verdict.killed_by) == (VerdictKind.SIGNALED, KilledBy.UNKNOWN)
    assert (verdict.exit_code, verdict.signal) == (137, "SIGKILL")


async def test_a_supervisor_stopped_from_outside_is_no_stop_of_the_drivers(sandboxes: Sandboxes) -> None:
    sandbox_id = await sandboxes.launch("steady-1")
    sandboxes.client.stop(sandboxes.container(sandbox_id, "supervisor"), timeout=5)

    verdict = await end_of_supervisor(sandboxes, sandbox_id)

    assert (verdict.kind, verdict.exit_code, verdict.signal) == (VerdictKind.SIGNALED, 143, "SIGTERM")
    assert (verdict.killed_by, verdict.reason) == (KilledBy.ENGINE_CLIENT, "ControlSupervisorExited")


async def test_a_supervisor_removed_from_outside_is_told_as_removed(sandboxes: Sandboxes) -> None:
    sandbox_id = await sandboxes.launch("steady-1")
    sandboxes.client.remove_container(sandboxes.container(sandbox_id, "supervisor"), force=True)

    verdict = await end_of_supervisor(sandboxes, sandbox_id)

    assert verdict.exit_code == 137
    assert verdict.kind in {VerdictKind.REMOVED, VerdictKind.KILLED_THROUGH_ENGINE}
    assert "by someone other than the driver" in verdict.message


async def test_a_supervisor_that_outgrows_its_memory_was_killed_by_the_kernel(sandboxes: Sandboxes) -> None:
    sandbox_id = await sandboxes.launch("oom-0")
    supervisor = sandboxes.container(sandbox_id, "supervisor")
    sandboxes.client.update_container(supervisor, mem_limit="32m", memswap_limit="32m")
    sandboxes.client.kill(supervisor, signal="SIGUSR1")

    verdict = await end_of_supervisor(sandboxes, sandbox_id)

    assert (verdict.kind, verdict.killed_by) == (VerdictKind.OUT_OF_MEMORY, KilledBy.KERNEL)
    assert (verdict.exit_code, verdict.signal, verdict.memory_limit_bytes) == (137, "SIGKILL", 32 * 2**20)
    assert "memory limit 32 MiB" in verdict.message


async def test_a_workload_that_outgrows_its_memory_is_no_runtime_restart(sandboxes: Sandboxes) -> None:
    sandbox_id = await sandboxes.launch("steady-1", log_level="oom", memory_limit="32Mi")

    verdict = verdict_of(await sandboxes.exit_event(sandbox_id, "workload"))

    assert (verdict.kind, verdict.reason) == (VerdictKind.OUT_OF_MEMORY, "ContainerExited")
    assert (verdict.exit_code, verdict.memory_limit_bytes) == (137, 32 * 2**20)


async def test_a_workload_whose_child_outgrew_the_memory_keeps_its_own_code(sandboxes: Sandboxes) -> None:
    sandbox_id = await sandboxes.launch("steady-1", log_level="child-oom", memory_limit="32Mi")

    verdict = verdict_of(await sandboxes.exit_event(sandbox_id, "workload"))

    assert (verdict.kind, verdict.exit_code, verdict.reason) == (VerdictKind.EXITED_AFTER_OOM, 5, "ContainerExited")


@pytest.mark.parametrize(
    ("sent", "kind", "code", "reason"),
    [
        ("SIGKILL", VerdictKind.KILLED_THROUGH_ENGINE, 137, "ContainerRuntimeRestart"),
        ("SIGTERM", VerdictKind.SIGNALED, 143, "ContainerRuntimeRestart"),
        ("SIGUSR1", VerdictKind.EXITED, 7, "ContainerExited"),
    ],
)
async def test_a_workload_that_is_signalled_from_outside(
    sandboxes: Sandboxes, sent: str, kind: VerdictKind, code: int, reason: str
) -> None:
    sandbox_id = await sandboxes.launch("steady-1")
    sandboxes.client.kill(sandboxes.container(sandbox_id, "sandbox"), signal=sent)

    verdict = verdict_of(await sandboxes.exit_event(sandbox_id, "workload"))

    assert (verdict.kind, verdict.exit_code, verdict.reason) == (kind, code, reason)
    observed = await sandboxes.gateway.wait_reason(sandbox_id, reason)
    assert f"code {code}" in ready(observed).message


async def test_a_delete_is_no_exit_to_be_told(sandboxes: Sandboxes) -> None:
    sandbox_id = await sandboxes.launch("steady-1")
    await sandboxes.delete(sandbox_id)
    await sandboxes.gateway.wait_deleted(sandbox_id)

    assert [each for each in sandboxes.gateway.platform_events(sandbox_id) if each.type == "Warning"] == []


@pytest.mark.parametrize(
    ("recipe", "code", "cause"),
    [
        (without_binary(Role.SUPERVISOR), 127, "no such file or directory"),
        (not_executable(Role.SUPERVISOR, SUPERVISOR_ENTRY), 126, "permission denied"),
    ],
    ids=["without its binary", "not executable"],
)
async def test_a_supervisor_that_cannot_run_says_why(
    drivers: Drivers,
    connect: Callable[..., AbstractAsyncContextManager[Sandboxes]],
    recipe: ImageRecipe,
    code: int,
    cause: str,
) -> None:
    from .conftest import runtime_recipe

    with drivers.running(supervisor=recipe, runtime=runtime_recipe()) as driver:
        async with connect(driver) as sandboxes:
            sandbox_id = await sandboxes.launch("steady-1")
            verdict = verdict_of(await sandboxes.exit_event(sandbox_id, "supervisor"))

    assert (verdict.kind, verdict.reason) == (VerdictKind.COULD_NOT_RUN, "ControlSupervisorStartFailed")
    assert (verdict.exit_code, verdict.killed_by) == (code, None)
    assert cause in verdict.engine_error
    assert SUPERVISOR_ENTRY in verdict.engine_error
    assert "OCI runtime" not in verdict.message
