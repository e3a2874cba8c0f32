"""The replay ledger: one effect for one id, whatever happens to the callers."""

from __future__ import annotations

import asyncio

import pytest

from openshell.isolation.envelope import RequestEnvelope
from openshell.isolation.errors import DeniedError, DescriptorError, ProcessError, UnavailableError
from openshell.isolation.operations import Exec, ExecSpec, Result, Signal, Signaled, SignalProcess
from openshell.isolation.replay import ReplayLedger


class Work:
    def __init__(self, outcome: Result | Exception | None = None) -> None:
        self.runs = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.outcome = outcome or Signaled()

    async def __call__(self) -> Result:
        self.runs += 1
        await self.gate.wait()
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


def request(request_id: str = "r", process_id: str = "p") -> RequestEnvelope:
    return RequestEnvelope.of(SignalProcess(process_id=process_id, signal=Signal.TERM), request_id=request_id)


def execution(request_id: str, expires: int) -> RequestEnvelope:
    return RequestEnvelope.of(
        Exec(spec=ExecSpec(program="/bin/true")), request_id=request_id, exec_expires_at_unix_ms=expires
    )


async def test_a_replay_gets_the_stored_result() -> None:
    ledger, work = ReplayLedger(), Work()
    first = await ledger.run(request(), work)
    assert await ledger.run(request(), work) is first
    assert work.runs == 1


async def test_a_replay_gets_the_stored_error() -> None:
    ledger, work = ReplayLedger(), Work(DeniedError("no"))
    for _ in range(2):
        with pytest.raises(DeniedError, match="no"):
            await ledger.run(request(), work)
    assert work.runs == 1


async def test_the_same_id_for_another_request_fails() -> None:
    ledger, work = ReplayLedger(), Work()
    await ledger.run(request(process_id="p"), work)
    with pytest.raises(DescriptorError, match="already used"):
        await ledger.run(request(process_id="q"), work)
    assert work.runs == 1


async def test_a_replay_during_the_work_waits_for_it() -> None:
    ledger, work = ReplayLedger(), Work()
    work.gate.clear()
    calls = [asyncio.create_task(ledger.run(request(), work)) for _ in range(3)]
    await asyncio.sleep(0)
    work.gate.set()
    assert await asyncio.gather(*calls) == [Signaled()] * 3
    assert work.runs == 1


async def test_a_caller_that_goes_away_does_not_interrupt_the_work() -> None:
    ledger, work = ReplayLedger(), Work()
    work.gate.clear()
    call = asyncio.create_task(ledger.run(request(), work))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    work.gate.set()
    assert await ledger.run(request(), work) == Signaled()
    assert work.runs == 1


async def test_an_internal_failure_does_not_leak_its_text() -> None:
    ledger = ReplayLedger()
    with pytest.raises(ProcessError) as caught:
        await ledger.run(request(), Work(RuntimeError("secret")))
    assert "secret" not in str(caught.value)


async def test_a_full_ledger_refuses_new_ids_and_answers_old_ones() -> None:
    ledger, work = ReplayLedger(capacity=2), Work()
    await ledger.run(request("1"), work)
    await ledger.run(request("2"), work)
    with pytest.raises(UnavailableError, match="limit of 2"):
        await ledger.run(request("3"), work)
    await ledger.run(request("1"), work)
    assert work.runs == 2


async def test_execs_are_forgotten_at_their_deadline_and_refused_after_it() -> None:
    now = 1000
    ledger, work = ReplayLedger(capacity=1, now=lambda: now), Work()
    await ledger.run(execution("e", 2000), work)
    now = 1999
    await ledger.run(execution("e", 2000), work)
    assert work.runs == 1
    now = 2000
    with pytest.raises(DescriptorError, match="deadline"):
        await ledger.run(execution("e", 2000), work)
    assert len(ledger) == 0
    await ledger.run(request("other"), work)


async def test_closing_cancels_what_still_runs() -> None:
    ledger, work = ReplayLedger(), Work()
    work.gate.clear()
    call = asyncio.create_task(ledger.run(request(), work))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await ledger.close()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_an_error_that_says_not_now_is_not_stored() -> None:
    ledger, work = ReplayLedger(), Work(UnavailableError("not yet"))
    with pytest.raises(UnavailableError):
        await ledger.run(request(), work)
    work.outcome = Signaled()
    assert await ledger.run(request(), work) == Signaled()
