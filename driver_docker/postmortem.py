"""Collecting the evidence of a container's end: one inspect and one bounded log read, side by side."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from driver_docker import tail
from driver_docker.concurrency import together
from driver_docker.config import PublicDetail
from driver_docker.engine import EngineAbsentError, EngineError, EngineUnreachableError
from driver_docker.verdict import ExitEvidence, judge
from openshell.verdicts import Component, Stage

if TYPE_CHECKING:
    from driver_docker.engine_objects import ContainerFacts
    from driver_docker.sandboxes import Sandbox
    from driver_docker.services import Services
    from openshell.verdicts import LastWords, Verdict


_KILL_SIGNALS = frozenset({"9", "KILL", "SIGKILL"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """A judged end."""

    verdict: Verdict
    facts: ContainerFacts | None
    tail: str = field(default="", repr=False)
    """The raw end of its log; for the owner-only record, never for a condition."""
    has_words: bool = False
    """Whether the supervisor said itself why it ended."""
    was_ready: bool = False
    """Whether the supervisor said itself that it had been ready."""


async def examine(
    services: Services,
    sandbox: Sandbox,
    component: Component,
    *,
    start_error: EngineError | None = None,
    workload_ended_first: bool = False,
) -> Exit:
    """Say why a container of a sandbox ended. Never raises on what the engine answers.

    Args:
        services: The driver's surroundings.
        sandbox: The sandbox.
        component: Which of its two current containers.
        start_error: The engine's refusal, where the start call was refused.
        workload_ended_first: Whether the workload had ended before this supervisor.
    """
    record = sandbox.record
    container = record.supervisor_id if component is Component.SUPERVISOR else record.workload_id
    (facts, absent, reachable), raw = await together(
        _inspect(services, container), _log(services, container, wanted=component is Component.SUPERVISOR)
    )
    read = tail.read_tail(raw, tty=bool(facts and facts.tty), secrets=sandbox.secrets)
    quoted = read.last_words if services.config.public_detail is PublicDetail.LAST_LINE else None
    verdict = judge(
        ExitEvidence(
            component=component,
            ready_before=record.was_ready or _killed_from_outside(sandbox, container) or _ran(read.last_words),
            facts=facts,
            absent=absent,
            engine_reachable=reachable,
            stop_requested=container in sandbox.intentional,
            workload_ended_first=workload_ended_first,
            lost=sandbox.lost,
            start_error=start_error.message if start_error is not None else None,
            events=tuple(sandbox.events.get(container, ())),
            last_words=quoted if component is Component.SUPERVISOR else None,
            generation=record.generation,
        )
    )
    return Exit(
        verdict=verdict,
        facts=facts,
        tail=read.text,
        has_words=read.last_words is not None,
        was_ready=_ran(read.last_words),
    )


def _killed_from_outside(sandbox: Sandbox, container: str) -> bool:
    """Whether somebody else's KILL ended it: an end that says nothing against the start, however early it came."""
    return container not in sandbox.intentional and any(
        event.action == "kill" and event.attributes.get("signal") in _KILL_SIGNALS
        for event in sandbox.events.get(container, ())
    )


def _ran(words: LastWords | None) -> bool:
    """Whether a supervisor says itself that it had been ready: it may end before the driver has seen it ready."""
    return words is not None and words.stage is Stage.RUNNING


async def _inspect(services: Services, container: str) -> tuple[ContainerFacts | None, bool, bool]:
    """The facts, whether the container is gone, and whether the engine could be asked."""
    try:
        return await services.engine.inspect_container(container), False, True
    except EngineAbsentError:
        return None, True, True
    except EngineUnreachableError:
        return None, False, False
    except EngineError:
        return None, False, True


async def _log(services: Services, container: str, *, wanted: bool) -> bytes:
    """The end of a log; a workload's is not read, since it holds the user's own output."""
    if not wanted:
        return b""
    try:
        return await services.engine.log_tail(container, max_lines=tail.MAX_LINES)
    except EngineError:
        return b""
