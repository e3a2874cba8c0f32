"""Owned tasks, side by side with one error and in the background with none lost; and locks by key."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar, overload
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")


@overload
async def together(first: Coroutine[Any, Any, A], second: Coroutine[Any, Any, B], /) -> tuple[A, B]: ...


@overload
async def together(
    first: Coroutine[Any, Any, A], second: Coroutine[Any, Any, B], third: Coroutine[Any, Any, C], /
) -> tuple[A, B, C]: ...


@overload
async def together(
    first: Coroutine[Any, Any, A],
    second: Coroutine[Any, Any, B],
    third: Coroutine[Any, Any, C],
    fourth: Coroutine[Any, Any, D],
    /,
) -> tuple[A, B, C, D]: ...


async def together(*coroutines: Coroutine[Any, Any, Any]) -> tuple[Any, ...]:
    """Run coroutines side by side and return their results in order.

    When one fails the others are cancelled and awaited, and its error alone is raised, so that nothing goes on behind
    the caller's back. Unlike a task group, it never cancels the calling task, whose count of cancellations would stay
    raised, and never takes an error of theirs for the end of a cancellation.

    Raises:
        asyncio.CancelledError: The calling task was cancelled, if only while they were being ended; all have ended.
    """
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        first, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await settled(asyncio.gather(*tasks, return_exceptions=True))
    for task in tasks:
        if task in first and not task.cancelled() and (error := task.exception()) is not None:
            raise error
    return tuple(task.result() for task in tasks)


async def uninterrupted(coroutine: Coroutine[Any, Any, A]) -> A:
    """Await a coroutine to its end, however often the awaiting task is cancelled meanwhile.

    Raises:
        asyncio.CancelledError: It was cancelled; the coroutine has come to its end all the same.
    """
    task = asyncio.create_task(coroutine)
    await settled(task)
    return task.result()


async def settled(future: asyncio.Future[Any]) -> None:
    """Return once a future is done. It is neither cancelled nor left with the awaiting task.

    Raises:
        asyncio.CancelledError: The awaiting task was cancelled, once or more; the future is done all the same.
    """
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return
    if not future.cancelled():
        future.exception()  # retrieved, so that it is not reported as forgotten
    raise cancelled


class KeyedLocks:
    """One lock for each key, one and the same as long as anybody has it; a key that nobody uses takes no memory."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def of(self, key: str) -> asyncio.Lock:
        """The lock of a key."""
        return self._locks.setdefault(key, asyncio.Lock())

    def __len__(self) -> int:
        """How many keys are in use."""
        return len(self._locks)


class Background:
    """Tasks that outlive the call that started them; all are awaited at the end."""

    def __init__(self, on_error: Callable[[str, BaseException], None]) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._on_error = on_error

    def spawn(self, coroutine: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        """Start a task that is kept until it ends; an error that nobody awaits is reported."""
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def to_the_end(self, coroutine: Coroutine[Any, Any, A], *, name: str) -> A:
        """Run a coroutine as a task that outlives its caller, and return its result to a caller that stayed."""
        outcome: asyncio.Future[A] = asyncio.get_running_loop().create_future()

        async def carry_out() -> None:
            try:
                result = await coroutine
            except asyncio.CancelledError:
                outcome.cancel()
                raise
            except BaseException as error:
                if outcome.cancelled():
                    raise  # nobody waits: reported as a background error
                outcome.set_exception(error)
            else:
                if not outcome.cancelled():
                    outcome.set_result(result)

        self.spawn(carry_out(), name=name)
        return await outcome

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_error(task.get_name(), error)

    async def close(self) -> None:
        """Cancel what is left and wait for it, and for what that starts at its end."""
        while tasks := tuple(self._tasks):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
