"""A bounded pool of daemon threads for blocking calls, awaited from asyncio.

The standard executor joins its threads when the interpreter ends, so one call to an engine that hangs would keep the
process from exiting. These threads do not.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from typing import TYPE_CHECKING, Any, Final, TypeVar

from driver_docker.concurrency import settled
from driver_docker.errors import DriverError
from openshell.status import StatusCode

if TYPE_CHECKING:
    from collections.abc import Callable

Result = TypeVar("Result")

_END: Final = object()


class NoWorkerError(DriverError):
    """A call was not begun, and never will be: the pool is closed, or the system gives it no thread."""

    default_reason = "NoWorker"
    default_status = StatusCode.UNAVAILABLE
    default_retryable = True


async def run_aside(name: str, call: Callable[[], Result]) -> Result:
    """Run one blocking call that has no pool of its own, such as one that asks a disk which may never answer.

    Args:
        name: What the call is about, for its thread.
        call: The blocking callable.

    Raises:
        NoWorkerError: There is no thread to be had; the call was not begun.
    """
    pool = WorkerPool(name, max_threads=1)
    try:
        return await pool.run(call)
    finally:
        pool.close()


class WorkerPool:
    """Runs blocking callables on at most `max_threads` daemon threads, started as they are needed."""

    def __init__(self, name: str, *, max_threads: int) -> None:
        self._name = name
        self._max_threads = max_threads
        self._jobs: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._idle = 0
        self._closed = False
        self._pending: set[asyncio.Future[Any]] = set()

    async def run(self, call: Callable[[], Result], *, to_the_end: bool = False) -> Result:
        """Run `call` on a thread and await its result.

        Args:
            call: The blocking callable.
            to_the_end: When the awaiting task is cancelled, however often, wait for the call's end before the
                cancellation is raised, so that whatever the call made exists or does not, and cannot appear later.

        Raises:
            NoWorkerError: The pool is closed, or has no thread and gets none; the call was not begun.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()

        def settle(result: Result | None, error: BaseException | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        withdrawn = False

        def job() -> None:
            if withdrawn:
                return
            try:
                result = call()
            except BaseException as error:  # handed to the awaiting task
                outcome: tuple[Result | None, BaseException | None] = (None, error)
            else:
                outcome = (result, None)
            try:
                loop.call_soon_threadsafe(settle, *outcome)
            except RuntimeError:
                return  # the loop is closed: nobody waits any more

        try:
            self._submit(job)
        except NoWorkerError:
            withdrawn = True  # it may lie in the queue until there is a thread again
            raise
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        if not to_the_end:
            return await future
        await settled(future)
        return future.result()

    def _submit(self, job: Callable[[], None]) -> None:
        with self._lock:
            if self._closed:
                raise NoWorkerError(f"worker pool {self._name} is closed")
            self._jobs.put(job)
            if self._idle >= self._jobs.qsize() or self._threads >= self._max_threads:
                return
            self._threads += 1
            number = self._threads
        try:
            threading.Thread(target=self._work, name=f"{self._name}-{number}", daemon=True).start()
        except RuntimeError as error:
            with self._lock:
                self._threads -= 1
                if self._threads:
                    return  # the ones that there are take it in its turn
            raise NoWorkerError(f"worker pool {self._name} gets no thread: {error}") from error

    def _work(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            job = self._jobs.get()
            with self._lock:
                self._idle -= 1
            if job is _END:
                return
            job()  # type: ignore[operator]

    def close(self, *, abandoned: Exception | None = None) -> None:
        """Take no more calls and let idle threads end; does not wait for busy ones. Idempotent.

        Args:
            abandoned: What callers of unfinished calls are told at once, also of those that were to be awaited to the
                end; without it they go on waiting.
        """
        if abandoned is not None:
            for future in tuple(self._pending):
                if not future.done():
                    future.set_exception(abandoned)
        with self._lock:
            if self._closed:
                return
            self._closed = True
            threads = self._threads
        for _ in range(threads):
            self._jobs.put(_END)
