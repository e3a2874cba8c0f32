"""One answer for all who ask the same at the same time, and never one that is older than the question."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from driver_docker.concurrency import KeyedLocks, settled
from driver_docker.errors import DriverError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

Answer = TypeVar("Answer")

_PATIENCE_SECONDS: Final = 1.0
"""How long a question waits for the one before it, whose answer may have been lost."""


@dataclass(slots=True, eq=False)
class _Question:
    """A question that waits for its turn or is on its way."""

    task: asyncio.Task[Any] = field(init=False)
    askers: int = 0


class SharedQuestions:
    """Asks one question of a kind at a time; who asks meanwhile shares the next one.

    Many launches at once ask for the same few images. The question that is on its way may have been answered already,
    so nobody joins it: all who come later wait until it has ended, if not for long, and share one that is asked then.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, _Question] = {}
        self._turns = KeyedLocks()

    async def ask(self, about: str, question: Callable[[], Awaitable[Answer]]) -> Answer:
        """The answer to a question. An error of it is raised to all who share it, to each as an object of its own.

        Args:
            about: The same for the same question alone.
            question: Asks it. Cancelled when all who share it are.
        """
        shared = self._waiting.get(about)
        if shared is None:
            shared = self._waiting[about] = _Question()
            shared.task = asyncio.create_task(self._in_turn(about, question), name=f"question about {about}")
        shared.askers += 1
        try:
            return cast("Answer", await asyncio.shield(shared.task))
        except DriverError as error:
            raise copy.copy(error) from error  # whoever it passes may note on it what it ended
        finally:
            shared.askers -= 1
            if not shared.askers and not shared.task.done():
                if self._waiting.get(about) is shared:
                    del self._waiting[about]  # before it is cancelled: nobody may join it any more
                shared.task.cancel()
                await settled(asyncio.gather(shared.task, return_exceptions=True))

    async def _in_turn(self, about: str, question: Callable[[], Awaitable[Answer]]) -> Answer:
        turn, has_turn = self._turns.of(about), False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_SECONDS):
                has_turn = await turn.acquire()
        try:
            del self._waiting[about]
            return await question()
        finally:
            if has_turn:
                turn.release()
