from __future__ import annotations

import asyncio
from collections import deque
from datetime import UTC, datetime
from typing import TYPE_CHECKING, cast

import pytest

from driver_docker import health
from driver_docker.engine import (
    EngineAbsentError,
    EngineConflictError,
    EngineRefusedError,
    EngineTimeoutError,
    EngineUnreachableError,
)
from driver_docker.engine_objects import ContainerStatus, EngineEvent, ExecResult, ImageFacts
from driver_docker.health import wait_until_healthy
from driver_docker.sandbox_record import RecordPhase, SandboxRecord
from driver_docker.sandboxes import Sandbox
from openshell.ready_line import READY_LABEL, READY_LABEL_VALUE, READY_LINE

if TYPE_CHECKING:
    from driver_docker.engine import Engine

NOW = datetime(2026, 10, 5, tzinfo=UTC)
PLAIN = ImageFacts(image_id="sha256:s")
TELLING = ImageFacts(image_id="sha256:s", labels={READY_LABEL: READY_LABEL_VALUE})


class Facts:
    """The one fact of an inspect that is looked at."""

    def __init__(self, status: ContainerStatus) -> None:
        self.status = status


class ProbedEngine:
    """Answers each probe with the next of its answers, and every inspect with one status or error."""

    def __init__(self, *probes: ExecResult | Exception, inspected: ContainerStatus | Exception) -> None:
        self._probes = deque(probes)
        self._inspected = inspected

    async def exec_command(self, container: str, argv: tuple[str, ...], *, timeout_seconds: float) -> ExecResult:
        answer = self._probes.popleft()
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def inspect_container(self, container: str) -> Facts:
        if isinstance(self._inspected, Exception):
            raise self._inspected
        return Facts(self._inspected)


class TellingEngine(ProbedEngine):
    """Its supervisor's log holds the line or not, or cannot be read."""

    def __init__(self, log: bool | Exception, *probes: ExecResult | Exception) -> None:
        super().__init__(*probes, inspected=ContainerStatus.EXITED)
        self._log = log

    async def wait_for_line(self, container: str, line: str, *, timeout_seconds: float) -> bool:
        assert (container, line) == ("supervisor", READY_LINE)
        assert timeout_seconds > 0
        if isinstance(self._log, Exception):
            raise self._log
        return self._log


class WaitingEngine:
    """Its first probe waits for the test's answer; its workload is as the test says."""

    def __init__(self) -> None:
        self.workload: ContainerStatus | Exception = ContainerStatus.RUNNING
        self.inspected = asyncio.Event()
        self.asked = asyncio.Event()
        self.asked_times = 0
        self.answer: asyncio.Future[ExecResult] = asyncio.get_running_loop().create_future()

    async def exec_command(self, container: str, argv: tuple[str, ...], *, timeout_seconds: float) -> ExecResult:
        self.asked.set()
        self.asked_times += 1
        return await self.answer

    async def inspect_container(self, container: str) -> Facts:
        self.inspected.set()
        assert container == "workload"
        if isinstance(self.workload, Exception):
            raise self.workload
        return Facts(self.workload)


REAL_PAUSE_AFTER = health.pause_after


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "pause_after", lambda **_: 0)


def sandbox() -> Sandbox:
    record = SandboxRecord(
        sandbox_id="id-1",
        name="n",
        workspace="w",
        phase=RecordPhase.PROVISIONING,
        changed_at=NOW,
        workload_id="workload",
        supervisor_id="supervisor",
    )
    return Sandbox(record=record)


async def outcome(*probes: ExecResult | Exception, inspected: ContainerStatus | Exception) -> bool:
    engine = ProbedEngine(*probes, inspected=inspected)
    return await wait_until_healthy(cast("Engine", engine), sandbox(), image=PLAIN)


GOOD = ExecResult(exit_code=0)
REFUSED = EngineRefusedError("Container c is not running: Exited (137) Less than a second ago")
CONFLICT = EngineConflictError("Container c is not running")


@pytest.mark.parametrize("error", [REFUSED, CONFLICT])
@pytest.mark.parametrize("over", [ContainerStatus.EXITED, ContainerStatus.DEAD, ContainerStatus.REMOVING])
async def test_a_refused_probe_of_a_dead_supervisor_ends_the_wait(error: Exception, over: ContainerStatus) -> None:
    assert await outcome(error, inspected=over) is False


@pytest.mark.parametrize("error", [REFUSED, CONFLICT])
async def test_a_refused_probe_of_a_removed_supervisor_ends_the_wait(error: Exception) -> None:
    assert await outcome(error, inspected=EngineAbsentError("gone")) is False


async def test_a_removed_supervisor_ends_the_wait() -> None:
    assert await outcome(EngineAbsentError("gone"), inspected=EngineAbsentError("gone")) is False


@pytest.mark.parametrize("error", [REFUSED, CONFLICT, EngineTimeoutError("slow")])
@pytest.mark.parametrize("alive", [ContainerStatus.RUNNING, ContainerStatus.PAUSED])
async def test_a_refused_probe_of_a_living_supervisor_is_tried_again(error: Exception, alive: ContainerStatus) -> None:
    assert await outcome(error, ExecResult(exit_code=1), ExecResult(exit_code=None), GOOD, inspected=alive) is True


async def test_an_engine_that_cannot_be_asked_ends_the_wait_with_its_error() -> None:
    with pytest.raises(EngineUnreachableError):
        await outcome(EngineUnreachableError("down"), inspected=ContainerStatus.RUNNING)


@pytest.mark.parametrize("container", ["workload", "supervisor"])
async def test_an_end_that_an_event_told_is_not_probed_for(container: str) -> None:
    ended = sandbox()
    ended.add_event(EngineEvent(kind="container", action="die", object_id=container, attributes={}, time=NOW))
    engine = ProbedEngine(inspected=ContainerStatus.RUNNING)
    assert await wait_until_healthy(cast("Engine", engine), ended, image=PLAIN) is False


@pytest.mark.parametrize("container", ["workload", "supervisor"])
async def test_an_end_is_not_waited_for_by_a_probe_that_waits(container: str, no_leaks: None) -> None:
    ended = sandbox()
    engine = WaitingEngine()
    waiting = asyncio.create_task(wait_until_healthy(cast("Engine", engine), ended, image=PLAIN))
    await engine.asked.wait()
    ended.add_event(EngineEvent(kind="container", action="exec_start", object_id=container, attributes={}, time=NOW))
    ended.add_event(EngineEvent(kind="container", action="die", object_id=container, attributes={}, time=NOW))
    assert await waiting is False
    assert engine.asked_times == 1


@pytest.mark.parametrize("found", [ContainerStatus.EXITED, ContainerStatus.DEAD, EngineAbsentError("gone")])
async def test_a_workload_whose_end_no_event_told_is_found_at_the_next_look(
    found: ContainerStatus | Exception, no_leaks: None
) -> None:
    launching = sandbox()
    engine = WaitingEngine()
    waiting = asyncio.create_task(wait_until_healthy(cast("Engine", engine), launching, image=PLAIN))
    await engine.asked.wait()
    engine.workload = found
    launching.notify()  # as every look at all sandboxes does
    assert await asyncio.wait_for(waiting, 10) is False


@pytest.mark.parametrize("found", [ContainerStatus.RUNNING, EngineUnreachableError("down"), EngineRefusedError("no")])
async def test_a_look_that_finds_no_end_does_not_end_the_wait(
    found: ContainerStatus | Exception, no_leaks: None
) -> None:
    launching = sandbox()
    engine = WaitingEngine()
    waiting = asyncio.create_task(wait_until_healthy(cast("Engine", engine), launching, image=PLAIN))
    await engine.asked.wait()
    engine.workload = found
    launching.notify()
    await asyncio.wait_for(engine.inspected.wait(), 10)
    engine.answer.set_result(GOOD)
    assert await waiting is True


async def test_what_was_healthy_before_it_ended_has_been_ready(no_leaks: None) -> None:
    ended = sandbox()
    engine = WaitingEngine()
    waiting = asyncio.create_task(wait_until_healthy(cast("Engine", engine), ended, image=PLAIN))
    await engine.asked.wait()
    engine.answer.set_result(GOOD)
    ended.add_event(EngineEvent(kind="container", action="die", object_id="supervisor", attributes={}, time=NOW))
    assert await waiting is True


async def test_a_supervisor_that_tells_is_not_asked() -> None:
    engine = TellingEngine(True)
    assert await wait_until_healthy(cast("Engine", engine), sandbox(), image=TELLING) is True


@pytest.mark.parametrize(
    "log", [False, EngineRefusedError("no log"), EngineAbsentError("gone"), CONFLICT, EngineUnreachableError("cut")]
)
@pytest.mark.parametrize(("probe", "healthy"), [(GOOD, True), (REFUSED, False)])
async def test_a_supervisor_that_does_not_tell_though_its_image_says_so_is_asked(
    log: bool | Exception, probe: ExecResult | Exception, healthy: bool
) -> None:
    engine = TellingEngine(log, probe)
    assert await wait_until_healthy(cast("Engine", engine), sandbox(), image=TELLING) is healthy


@pytest.mark.parametrize("labels", [{}, {READY_LABEL: "2"}, {READY_LABEL: ""}])
async def test_a_supervisor_whose_image_does_not_say_that_it_tells_is_asked_at_once(labels: dict[str, str]) -> None:
    engine = TellingEngine(AssertionError("asked"), GOOD)
    image = ImageFacts(image_id="sha256:s", labels=labels)
    assert await wait_until_healthy(cast("Engine", engine), sandbox(), image=image) is True


async def test_a_supervisor_that_tells_and_ends_at_once_has_been_ready(no_leaks: None) -> None:
    ended, read = sandbox(), asyncio.Event()

    class SlowLog(TellingEngine):
        async def wait_for_line(self, container: str, line: str, *, timeout_seconds: float) -> bool:
            await read.wait()
            return True

    waiting = asyncio.create_task(wait_until_healthy(cast("Engine", SlowLog(True)), ended, image=TELLING))
    await asyncio.sleep(0)
    ended.add_event(EngineEvent(kind="container", action="die", object_id="supervisor", attributes={}, time=NOW))
    for _ in range(5):
        await asyncio.sleep(0)  # the end is seen
    read.set()
    assert await waiting is True


@pytest.mark.parametrize(
    ("probe", "waited", "pause"),
    [(0.05, 0.05, 0.2), (0.3, 0.3, 0.0), (1.5, 4.5, 0.0), (0.05, 20.0, 1.0), (1.5, 300.0, 1.0)],
)
def test_only_a_probe_that_was_answered_at_once_is_paused_after(probe: float, waited: float, pause: float) -> None:
    assert REAL_PAUSE_AFTER(probe_seconds=probe, waited_seconds=waited) == pytest.approx(pause)
