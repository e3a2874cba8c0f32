"""Launches over an engine in memory: every step that fails gives the condition the reason of its own step."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from scripted.compute_gateway import launch_authentication, sandbox
from scripted.launching_engine import USER_IMAGE, launching
from scripted.memory_engine import record

from driver_docker.engine import (
    EngineAbsentError,
    EngineConflictError,
    EngineError,
    EngineTimeoutError,
    EngineUnreachableError,
)
from driver_docker.engine_objects import ContainerStatus
from driver_docker.errors import DriverError, ProvisioningError, RecordError
from driver_docker.launch import Launcher
from driver_docker.launch_steps import as_failure, during
from driver_docker.reclaim import reclaim
from driver_docker.records import LAUNCH_FILES
from driver_docker.relaunch import Relauncher
from driver_docker.requests import decode_sandbox
from driver_docker.sandbox_record import RecordPhase
from openshell.status import StatusCode

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from scripted.memory_engine import MemoryDriver

    from driver_docker.sandboxes import Sandbox

pytestmark = pytest.mark.usefixtures("no_leaks")


async def launch(driver: MemoryDriver, launcher: Launcher) -> Sandbox:
    request = decode_sandbox(sandbox(USER_IMAGE), namespace="default", allow_driver_config=False)
    entry = driver.services.table.add(
        replace(
            record(request.sandbox_id, RecordPhase.PROVISIONING, workload_id="", supervisor_id=""), container_name="w"
        )
    )
    await launcher.launch(entry, request, launch_authentication())
    return entry


async def failure(driver: MemoryDriver, launcher: Launcher) -> tuple[str, str]:
    with pytest.raises(DriverError) as failed:
        await launch(driver, launcher)
    return as_failure(failed.value)


async def test_a_launch_on_it_comes_through(tmp_path: Path) -> None:
    async with launching(tmp_path) as (driver, launcher):
        entry = await launch(driver, launcher)
        assert entry.record.supervisor_id in driver.engine.containers


def first(call: str, about: Callable[[str], bool] = lambda _: True) -> Callable[[str, str], bool]:
    return lambda asked, of: asked == call and about(of)


STEPS = {
    "the workload's image is looked at": (first("inspect_image", lambda of: "user" in of), "ImagePullFailed"),
    "the supervisor's image is looked at": (first("inspect_image", lambda of: "supervisor" in of), "ImagePullFailed"),
    "the runtime's volume is looked at": (first("inspect_volume"), "BoundaryChannelCreateFailed"),
    "the runtime's volume is created": (
        first("create_volume", lambda of: "runtime" in of),
        "BoundaryChannelCreateFailed",
    ),
    "the runtime's volume is filled": (
        first("create_container", lambda of: of.endswith("-fill")),
        "BoundaryChannelCreateFailed",
    ),
    "the accounts' container is created": (
        first("create_container", lambda of: of.endswith("-identity")),
        "IdentityResolutionFailed",
    ),
    "the accounts are read": (first("get_archive"), "IdentityResolutionFailed"),
    "the channel is created": (first("create_volume", lambda of: "channel" in of), "BoundaryChannelCreateFailed"),
    "the workload is created": (
        first("create_container", lambda of: of.startswith("openshell-default--steady") and "-supervisor" not in of
              and not of.endswith("-identity")),
        "ContainerCreateFailed",
    ),
    "the fence is inspected": (first("inspect_container"), "OuterFenceInspectFailed"),
    "the workload's files are staged": (
        first("put_archive", lambda of: of.startswith("openshell-default") and "-supervisor" not in of),
        "BoundaryConfigWriteFailed",
    ),
    "the supervisor's files are staged": (
        first("put_archive", lambda of: of.endswith("-supervisor")),
        "BoundaryConfigWriteFailed",
    ),
    "the workload is started": (
        first("start_container", lambda of: not of.endswith("-supervisor")),
        "ContainerStartFailed",
    ),
    "the supervisor is started": (
        first("start_container", lambda of: of.endswith("-supervisor")),
        "ControlSupervisorStartFailed",
    ),
    "health is asked for": (first("exec_command"), "ControlSupervisorStartFailed"),
}  # fmt: skip


AWAY, FAULTY = EngineUnreachableError("the engine is away"), EngineError("it answered 500")
CASES = [
    (step, error)
    for step in STEPS
    for error in (AWAY, FAULTY)
    if error is AWAY or "started" not in step  # what an engine refuses to start is judged as an end
]


@pytest.mark.parametrize(("step", "away"), CASES)
async def test_an_engine_that_fails_at_a_step_gives_the_reason_of_the_step(
    tmp_path: Path, step: str, away: EngineError
) -> None:
    meant, reason = STEPS[step]
    async with launching(tmp_path) as (driver, launcher):
        reached = False

        def refuse(call: str, about: str) -> Exception | None:
            nonlocal reached
            reached |= meant(call, about)
            return type(away)(away.message) if meant(call, about) else None

        driver.engine.refuse = refuse
        found, message = await failure(driver, launcher)
        assert reached
        assert (found, away.message in message) == (reason, True)


async def test_the_end_of_a_supervisor_is_told_without_any_secret_it_was_given(tmp_path: Path) -> None:
    auth = tmp_path / "proxy-auth"
    auth.write_text("alice:hunter2!\n")
    async with launching(tmp_path, https_proxy="https://proxy:1", proxy_auth_file=auth) as (driver, launcher):
        entry = await launch(driver, launcher)
        assert "alice:hunter2!" in entry.secrets
        # A start gives them to the next supervisor, and those of a rotated file count from then on.
        auth.write_text("bob:correct-horse\n")
        driver.engine.change(entry.record.workload_id, status=ContainerStatus.EXITED)
        await Relauncher(driver.services, launcher).run(entry)
        assert {"correct-horse", "bob:correct-horse"} < set(entry.secrets)
        assert len(entry.secrets) == len(set(entry.secrets))
        given: set[str] = set(entry.secrets)
        # A driver that adopts it reads them again.
        entry.record = replace(entry.record, phase=RecordPhase.ACTIVE)
        await driver.services.save(entry)
        driver.services.table.discard(entry)
        await reclaim(driver.services)
        (adopted,) = driver.services.table
        assert set(adopted.secrets) == given


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("save_files", "BoundaryStateCreateFailed"),
        ("save", "BoundaryStateCreateFailed"),
        ("commit_files", "BoundaryConfigWriteFailed"),
    ],
)
async def test_a_disk_that_refuses_gives_the_reason_of_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, reason: str
) -> None:
    async with launching(tmp_path) as (driver, launcher):

        def full(*_: object, **__: object) -> None:
            raise RecordError("state of sandbox x cannot be written: No space left on device")

        monkeypatch.setattr(driver.services.store, method, full)
        assert await failure(driver, launcher) == (
            reason,
            "state of sandbox x cannot be written: No space left on device",
        )


@pytest.mark.parametrize("error", [EngineTimeoutError("slow"), EngineUnreachableError("away"), EngineError("500")])
async def test_an_end_that_cannot_be_looked_at_is_an_engine_that_cannot_be_asked(
    tmp_path: Path, error: EngineError
) -> None:
    """Otherwise the condition would hold a reason that gateways wait for, of a sandbox of which nothing is left."""
    async with launching(tmp_path) as (driver, launcher):
        inspected = 0

        def refuse(call: str, about: str) -> Exception | None:
            nonlocal inspected
            if call == "exec_command":
                return EngineAbsentError("gone")  # so it is over, as the probe tells
            if call == "inspect_container":
                inspected += 1
                return error if inspected > 1 else None
            return None

        driver.engine.refuse = refuse
        with pytest.raises(EngineUnreachableError, match="is not known") as failed:
            await launch(driver, launcher)
        assert as_failure(failed.value)[0] == "ControlSupervisorStartFailed"


async def test_a_start_without_its_launch_input_is_a_supervisor_that_is_gone(tmp_path: Path) -> None:
    async with launching(tmp_path) as (driver, launcher):
        entry = await launch(driver, launcher)
        await driver.services.remove_files(entry, LAUNCH_FILES)
        with pytest.raises(DriverError, match="is missing") as failed:
            await Relauncher(driver.services, launcher).run(entry)
        assert as_failure(failed.value)[0] == "ControlSupervisorExited"


def test_the_innermost_step_counts_and_a_reason_of_its_own_more() -> None:
    with pytest.raises(DriverError) as failed, during("Outer"), during("Inner"):
        raise EngineUnreachableError("away")
    assert as_failure(failed.value) == ("Inner", "away")
    assert failed.value.reason == "EngineUnreachable"
    assert failed.value.status is StatusCode.UNAVAILABLE
    with pytest.raises(DriverError) as failed, during("Outer"):
        raise RecordError("full", reason="RecordUnreadable")
    assert as_failure(failed.value) == ("Outer", "full")
    assert as_failure(RecordError("full")) == ("BoundaryStateCreateFailed", "full")


def test_an_engine_that_refuses_a_step_ends_the_launch_and_one_that_is_away_may_be_asked_again() -> None:
    with pytest.raises(ProvisioningError) as failed, during("Outer"), during("Inner", refused="x could not be made"):
        raise EngineConflictError("taken")
    assert as_failure(failed.value) == ("Inner", "x could not be made: taken")
    with pytest.raises(EngineTimeoutError) as away, during("Inner", refused="x could not be made"):
        raise EngineTimeoutError("slow")
    assert as_failure(away.value) == ("Inner", "slow")
    assert as_failure(EngineUnreachableError("away")) == ("ContainerCreateFailed", "away")
    reason, message = as_failure(ValueError("s3cr3t"))
    assert reason == "ContainerCreateFailed"
    assert "s3cr3t" not in message
