"""Threads and tasks: bounded, awaited, cancellation safe."""

from __future__ import annotations

import asyncio
import re
import threading
from pathlib import Path

import pytest

from driver_docker.concurrency import Background, together, uninterrupted
from driver_docker.errors import DriverError, public_text
from driver_docker.workers import NoWorkerError, WorkerPool, run_aside

ROOM = Path(__file__).parents[3] / "driver_docker"

pytestmark = pytest.mark.usefixtures("no_leaks")


async def test_results_and_errors_come_back() -> None:
    pool = WorkerPool("t", max_threads=2)
    assert await pool.run(lambda: 41 + 1) == 42
    with pytest.raises(ZeroDivisionError):
        await pool.run(lambda: 1 // 0)
    pool.close()
    with pytest.raises(NoWorkerError, match="closed"):
        await pool.run(lambda: 1)


async def test_no_more_threads_run_than_allowed() -> None:
    pool = WorkerPool("t", max_threads=3)
    gate, running, most, lock = threading.Event(), 0, 0, threading.Lock()

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        gate.wait(10)
        with lock:
            running -= 1

    calls = [asyncio.create_task(pool.run(work)) for _ in range(10)]
    async with asyncio.timeout(10):
        while most < 3:  # noqa: ASYNC110 - a thread cannot set an asyncio event
            await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*calls)
    assert most == 3
    pool.close()


@pytest.mark.parametrize("times", [1, 2, 3])
async def test_a_call_to_the_end_is_awaited_however_often_its_caller_is_cancelled(times: int) -> None:
    pool = WorkerPool("t", max_threads=1)
    begun, gate, done = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        gate.wait(10)
        done.set()

    task = asyncio.create_task(pool.run(work, to_the_end=True))
    while not begun.is_set():  # noqa: ASYNC110 - a thread cannot set an asyncio event
        await asyncio.sleep(0)
    for _ in range(times):
        task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
    assert not task.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done.is_set()
    pool.close()


async def test_a_call_to_the_end_whose_caller_was_cancelled_ends_with_its_pool_at_the_latest() -> None:
    pool = WorkerPool("t", max_threads=1)
    gate = threading.Event()
    task = asyncio.create_task(pool.run(lambda: gate.wait(10), to_the_end=True))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    pool.close(abandoned=DriverError("given up"))
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.set()


@pytest.mark.parametrize("times", [1, 2, 3])
async def test_what_is_uninterrupted_comes_to_its_end_before_the_cancellation_is_raised(times: int) -> None:
    gate, steps = asyncio.Event(), list[str]()

    async def conclude() -> None:
        await gate.wait()
        steps.append("told")

    async def outer() -> None:
        await uninterrupted(conclude())
        steps.append("went on")

    task = asyncio.create_task(outer())
    await asyncio.sleep(0)
    for _ in range(times):
        task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
    assert not task.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert steps == ["told"]


async def test_what_is_uninterrupted_gives_its_result_and_raises_its_error() -> None:
    async def answer() -> int:
        return 42

    async def fail() -> None:
        raise DriverError("told")

    assert await uninterrupted(answer()) == 42
    with pytest.raises(DriverError, match="told"):
        await uninterrupted(fail())


async def test_one_failure_ends_what_runs_beside_it_and_is_raised_alone() -> None:
    cancelled = asyncio.Event()

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def fail() -> None:
        await asyncio.sleep(0)
        raise DriverError("told")

    with pytest.raises(DriverError, match="told"):
        await together(forever(), fail())
    assert cancelled.is_set()


async def _settles_late(done: asyncio.Event) -> None:
    await uninterrupted(done.wait())


async def _fails() -> None:
    raise DriverError("told")


async def test_a_failure_of_one_leaves_no_cancellation_with_the_task_that_waited_for_both() -> None:
    task = asyncio.current_task()
    assert task is not None
    with pytest.raises(DriverError, match="told"):
        await together(asyncio.Event().wait(), _fails())
    assert task.cancelling() == 0


async def test_a_cancellation_while_the_others_are_being_ended_is_not_lost() -> None:
    done = asyncio.Event()
    waiting = asyncio.create_task(together(_settles_late(done), _fails()))
    for _ in range(5):
        await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.sleep(0)
    done.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_what_a_background_task_starts_at_its_end_is_ended_with_it() -> None:
    background = Background(lambda *_: None)
    started: list[asyncio.Task[None]] = []

    async def ends_late() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            started.append(background.spawn(ends_never(), name="second"))

    async def ends_never() -> None:
        await asyncio.Event().wait()

    background.spawn(ends_late(), name="first")
    await asyncio.sleep(0)
    await background.close()
    assert [task.cancelled() for task in started] == [True]


async def test_a_background_error_is_reported_and_the_rest_is_ended() -> None:
    seen: list[str] = []
    background = Background(lambda name, error: seen.append(f"{name}: {error}"))

    async def fail() -> None:
        raise DriverError("told")

    async def forever() -> None:
        await asyncio.Event().wait()

    background.spawn(fail(), name="first")
    endless = background.spawn(forever(), name="second")
    await asyncio.sleep(0)
    await background.close()
    assert seen == ["first: told"]
    assert endless.cancelled()


@pytest.mark.parametrize("text", ["", " \n\t", "\x00\x1b", "::", "ü" * 3000, "a\r\nb", "x" * 1025, "cause: "])
def test_public_texts_are_one_bounded_line_and_never_empty(text: str) -> None:
    made = public_text(text)
    assert made
    assert made.isprintable()
    assert not made.endswith(":")
    assert len(made.encode()) <= 1024


async def test_a_system_without_threads_is_told_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, ran = WorkerPool("t", max_threads=2), []
    with monkeypatch.context() as full:

        def refuse(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        full.setattr("threading.Thread.start", refuse)
        for _ in range(5):
            with pytest.raises(NoWorkerError, match="can't start new thread"):
                await pool.run(lambda: ran.append("told as not begun"))
    assert await pool.run(lambda: 42) == 42
    assert ran == []
    pool.close()


async def test_a_call_that_gets_no_thread_of_its_own_waits_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, gate, busy = WorkerPool("t", max_threads=2), threading.Event(), threading.Event()

    def work() -> None:
        busy.set()
        gate.wait(10)

    first = asyncio.create_task(pool.run(work))
    async with asyncio.timeout(10):
        while not busy.is_set():  # noqa: ASYNC110 - a thread cannot set an asyncio event
            await asyncio.sleep(0)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr("threading.Thread.start", refuse)
        second = asyncio.create_task(pool.run(lambda: 42))
        await asyncio.sleep(0)
        gate.set()
        assert await asyncio.wait_for(second, 10) == 42
    await first
    pool.close()


async def test_a_call_on_a_thread_of_its_own_leaves_nothing_behind_and_cannot_keep_the_process() -> None:
    def work() -> bool:
        return threading.current_thread().daemon

    assert await run_aside("t", work)
    with pytest.raises(ZeroDivisionError):
        await run_aside("t", lambda: 1 // 0)


def test_nothing_that_serves_uses_the_executor_whose_threads_are_joined_at_the_end() -> None:
    own = {"overview.py", "leftovers.py"}  # of commands that end with what they ask for
    files = {file.name for file in ROOM.glob("*.py") if re.search(r"to_thread\(|run_in_executor\(", file.read_text())}
    assert files == own
