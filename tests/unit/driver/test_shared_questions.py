"""Questions that are asked at the same time, over an engine that answers when it is told to."""

from __future__ import annotations

import asyncio

import pytest

from driver_docker import shared_questions
from driver_docker.engine import EngineUnreachableError
from driver_docker.shared_questions import SharedQuestions

pytestmark = pytest.mark.usefixtures("no_leaks")


class Oracle:
    """Answers each question with its number once it may."""

    def __init__(self) -> None:
        self.asked = 0
        self.cancelled = 0
        self.may_answer = asyncio.Event()
        self.refusal: Exception | None = None

    async def answer(self) -> int:
        self.asked += 1
        number = self.asked
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.refusal is not None:
            raise self.refusal
        return number


def ask(questions: SharedQuestions, oracle: Oracle, count: int, about: str = "x") -> list[asyncio.Task[int]]:
    return [asyncio.create_task(questions.ask(about, oracle.answer)) for _ in range(count)]


async def turns() -> None:
    """Let every task go as far as it can."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_who_asks_at_the_same_time_shares_one_answer() -> None:
    questions, oracle = SharedQuestions(), Oracle()
    oracle.may_answer.set()
    assert await asyncio.gather(*ask(questions, oracle, 50)) == [1] * 50


async def test_nobody_gets_an_answer_that_is_older_than_the_question() -> None:
    questions, oracle = SharedQuestions(), Oracle()
    first = ask(questions, oracle, 1)
    await turns()
    later = ask(questions, oracle, 3)
    await turns()
    assert oracle.asked == 1, "one at a time"
    oracle.may_answer.set()
    assert await asyncio.gather(*first, *later) == [1, 2, 2, 2]


async def test_different_questions_do_not_wait_for_each_other() -> None:
    questions, oracle = SharedQuestions(), Oracle()
    both = ask(questions, oracle, 1, about="x") + ask(questions, oracle, 1, about="y")
    await turns()
    assert oracle.asked == 2
    oracle.may_answer.set()
    assert await asyncio.gather(*both) == [1, 2]


async def test_a_failure_is_told_to_all_who_share_it_and_not_to_the_next() -> None:
    questions, oracle = SharedQuestions(), Oracle()
    oracle.refusal = EngineUnreachableError("gone", retryable=True)
    oracle.may_answer.set()
    failed = await asyncio.gather(*ask(questions, oracle, 3), return_exceptions=True)
    assert [(type(each), str(each)) for each in failed] == [(EngineUnreachableError, "gone")] * 3
    assert len({id(each) for each in failed}) == 3, "each may be noted on"
    oracle.refusal = None
    assert await questions.ask("x", oracle.answer) == 2


async def test_a_question_whose_answer_is_lost_does_not_hold_the_next_one_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_questions, "_PATIENCE_SECONDS", 0.0)
    questions, lost, oracle = SharedQuestions(), Oracle(), Oracle()
    oracle.may_answer.set()
    never = ask(questions, lost, 1)
    await turns()
    assert await asyncio.wait_for(asyncio.gather(*ask(questions, oracle, 3)), 10) == [1, 1, 1]
    never[0].cancel()
    await asyncio.gather(*never, return_exceptions=True)


async def test_who_goes_away_leaves_the_answer_to_the_others() -> None:
    questions, oracle = SharedQuestions(), Oracle()
    gone, staying = ask(questions, oracle, 2)
    await turns()
    gone.cancel()
    await turns()
    oracle.may_answer.set()
    assert await staying == 1
    assert gone.cancelled()


@pytest.mark.parametrize("on_its_way", [True, False])
async def test_a_question_of_nobody_is_cancelled_and_the_next_is_asked_anew(on_its_way: bool) -> None:
    questions, oracle = SharedQuestions(), Oracle()
    before = [] if on_its_way else ask(questions, oracle, 1)
    await turns()
    gone = ask(questions, oracle, 2)
    await turns()
    for task in gone:
        task.cancel()
    after = ask(questions, oracle, 1)
    await asyncio.gather(*gone, return_exceptions=True)
    assert oracle.cancelled == (1 if on_its_way else 0)
    oracle.may_answer.set()
    assert await asyncio.gather(*before, *after) == ([2] if on_its_way else [1, 2])
