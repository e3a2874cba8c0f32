"""Owned tasks: side by side with one error, and in the background with none lost."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar, overload

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
    the caller's back.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as failures:
        raise _first(failures) from None
    return tuple(task.result() for task in tasks)


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    inner = failures.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner


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
        """Cancel what is left and wait for it."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
