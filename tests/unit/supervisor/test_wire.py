"""The whole supervisor as a process, between a gateway and a boundary that speak their real protocols."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
from unit.supervisor.fake_gateway import INSTANCE_ID, settled
from unit.supervisor.toy_backend import ToyBackend, cut, served

from openshell.isolation.errors import DeniedError
from openshell.isolation.operations import ExitStatus, LandlockRequirement
from openshell.verdicts import LastWords, Stage
from openshell.wire.v1 import openshell_pb2
from supervisor_reference.boundary import connect_backend
from supervisor_reference.exit_codes import ExitCode
from supervisor_reference.probe import probe
from supervisor_reference.process import until_end_or_signal
from supervisor_reference.run import Supervisor

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine
    from pathlib import Path

    from unit.supervisor.fake_gateway import FakeGateway
    from unit.supervisor.launch_material import LaunchMaterial

    from supervisor_reference.grpc_gateway import GrpcGateway
    from supervisor_reference.timing import Timing

    Spawn = Callable[[], Coroutine[object, object, asyncio.subprocess.Process]]


@pytest.fixture
async def backend(launch: LaunchMaterial) -> ToyBackend:
    return ToyBackend(launch)


@pytest.fixture
async def boundary(backend: ToyBackend, launch: LaunchMaterial, tmp_path: Path) -> AsyncIterator[ToyBackend]:
    async with served(backend, launch, tmp_path / "control.sock"):
        yield backend


@pytest.fixture
async def spawn(fake: FakeGateway, launch: LaunchMaterial, tmp_path: Path) -> AsyncIterator[Spawn]:
    """Starts the supervisor as its container would."""
    started: list[asyncio.subprocess.Process] = []

    async def start() -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-Im",
            "supervisor_reference",
            *launch.stage(tmp_path),
            env={"PATH": os.defpath, **launch.environment(fake.url)},
            stderr=asyncio.subprocess.PIPE,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def ended(process: asyncio.subprocess.Process) -> tuple[int | None, LastWords | None]:
    _, errors = await asyncio.wait_for(process.communicate(), 30)
    lines = errors.decode().splitlines()
    return process.returncode, LastWords.find_in(lines[-1]) if lines else None


async def test_launches_serves_and_reports_the_end(
    fake: FakeGateway, boundary: ToyBackend, spawn: Spawn, tmp_path: Path
) -> None:
    process = await spawn()
    session = await asyncio.wait_for(fake.sessions.get(), 30)
    await settled(session)
    assert await asyncio.to_thread(probe, ["--socket", str(tmp_path / "health.sock")]) == 0
    assert boundary.attached is not None
    assert boundary.attached.supervisor_instance_id == session.hello.instance_id
    assert boundary.attached.policy.landlock is LandlockRequirement.HARD_REQUIREMENT
    assert boundary.started is not None
    assert boundary.started.spec.program == "/bin/agent"
    boundary.ended.set_result(ExitStatus.exited(3))
    assert await ended(process) == (0, None)
    (report,) = fake.of("ReportMainProcessExit")
    assert isinstance(report, openshell_pb2.ReportMainProcessExitRequest)
    assert report.exit_code == 3
    assert len(fake.of("FinalizeMainProcessExit")) == 1
    assert boundary.terminated.is_set()
    assert not (tmp_path / "health.sock").exists()


async def test_sigterm_leaves_the_boundary_frozen(fake: FakeGateway, boundary: ToyBackend, spawn: Spawn) -> None:
    process = await spawn()
    await settled(await asyncio.wait_for(fake.sessions.get(), 30))
    process.send_signal(signal.SIGTERM)
    code, words = await ended(process)
    assert code == 143
    assert words is not None
    assert (words.stage, words.public) == (Stage.RUNNING, "ended by SIGTERM from outside")
    await asyncio.wait_for(boundary.frozen.wait(), 30)
    assert not boundary.terminated.is_set()


async def test_sigkill_freezes_the_workload(fake: FakeGateway, boundary: ToyBackend, spawn: Spawn) -> None:
    process = await spawn()
    await settled(await asyncio.wait_for(fake.sessions.get(), 30))
    process.kill()
    await asyncio.wait_for(boundary.frozen.wait(), 30)
    assert not boundary.terminated.is_set()


async def test_a_refusal_travels_from_backend_to_gateway(fake: FakeGateway, boundary: ToyBackend, spawn: Spawn) -> None:
    boundary.refusal = DeniedError("no user 1500 here")
    code, words = await ended(await spawn())
    assert code == 77
    assert words is not None
    assert "1500" not in words.public
    assert fake.reports()[-1].refused_before_start
    (pushed,) = fake.of("PushSandboxLogs")
    assert isinstance(pushed, openshell_pb2.PushSandboxLogsRequest)
    assert pushed.logs[0].message == "isolation backend 'openshell-sandbox' refused attachment: no user 1500 here"
    assert boundary.started is None


async def test_a_boundary_that_listens_late_is_waited_for(
    fake: FakeGateway, backend: ToyBackend, launch: LaunchMaterial, spawn: Spawn, tmp_path: Path
) -> None:
    process = await spawn()
    await asyncio.wait_for(fake.called("ReportSandboxConfiguration"), 30)
    async with served(backend, launch, tmp_path / "control.sock"):
        await asyncio.wait_for(fake.sessions.get(), 30)
        backend.ended.set_result(ExitStatus.exited(0))
        assert await ended(process) == (0, None)


async def test_a_cut_connection_freezes_the_workload_until_it_is_replaced(
    fake: FakeGateway, backend: ToyBackend, launch: LaunchMaterial, spawn: Spawn, tmp_path: Path
) -> None:
    async with served(backend, launch, tmp_path / "control.sock") as server:
        process = await spawn()
        await settled(await asyncio.wait_for(fake.sessions.get(), 30))
        await backend.waits.get()
        cut(server)
        await asyncio.wait_for(backend.waits.get(), 30)
        assert not backend.frozen.is_set()
        assert backend.freezes == 1
        backend.ended.set_result(ExitStatus.exited(3))
        assert await ended(process) == (0, None)
    (report,) = fake.of("ReportMainProcessExit")
    assert isinstance(report, openshell_pb2.ReportMainProcessExitRequest)
    assert report.exit_code == 3
    assert len(fake.of("ConnectSupervisor")) == 1, "the gateway notices nothing"


async def test_a_boundary_that_goes_away_for_good_ends_the_supervisor(
    fake: FakeGateway, gateway: GrpcGateway, backend: ToyBackend, launch: LaunchMaterial, timing: Timing, tmp_path: Path
) -> None:
    supervisor = Supervisor(
        launch.inputs(fake.url),
        gateway=gateway,
        open_boundary=partial(connect_backend, recovery_seconds=0.05),
        instance_id=INSTANCE_ID,
        timing=timing,
    )
    async with served(backend, launch, tmp_path / "control.sock"):
        outcome = asyncio.create_task(until_end_or_signal(supervisor, timing))
        await settled(await fake.sessions.get())
        await backend.waits.get()
    code, words = await outcome
    assert code is ExitCode.INFRASTRUCTURE
    assert words is not None
    assert (words.stage, words.public) == (
        Stage.RUNNING,
        "isolation backend 'openshell-sandbox' was lost: its connection broke",
    )


async def test_renewed_tokens_reach_the_boundary_without_freezing_the_workload(
    fake: FakeGateway, gateway: GrpcGateway, backend: ToyBackend, launch: LaunchMaterial, timing: Timing, tmp_path: Path
) -> None:
    object.__setattr__(launch.auth, "sandbox_expires_at", int(time.time()))
    fake.refreshed = [
        openshell_pb2.RefreshSandboxTokenResponse(
            token="gateway-token-1", sandbox_token=launch.sandbox_token(auth_epoch=2), credential_epoch=2
        )
    ]
    timing = replace(timing, shortest_token_use_seconds=0.01)
    supervisor = Supervisor(
        launch.inputs(fake.url),
        gateway=gateway,
        open_boundary=connect_backend,
        instance_id=INSTANCE_ID,
        timing=timing,
    )
    async with served(backend, launch, tmp_path / "control.sock") as server:
        outcome = asyncio.create_task(until_end_or_signal(supervisor, timing))
        for _ in range(2):  # on the first connection, and on the one that the newer epoch needs
            await backend.waits.get()
        assert server.state.pinned is not None
        assert server.state.pinned.auth_epoch == 2
        assert backend.freezes == 0
        backend.ended.set_result(ExitStatus.exited(0))
        assert await outcome == (ExitCode.ORDERLY, None)


async def test_a_token_of_another_sandbox_is_told_apart_from_a_refusal(
    fake: FakeGateway, boundary: ToyBackend, launch: LaunchMaterial, spawn: Spawn, tmp_path: Path
) -> None:
    launch.stage(tmp_path)
    object.__setattr__(launch.auth, "sandbox_token", launch.auth.sandbox_token[:-8] + "AAAAAAAA")
    code, words = await ended(await spawn())
    assert code == 69
    assert words is not None
    assert words.public == "isolation backend 'openshell-sandbox' refused this supervisor"
    assert boundary.attached is None
