"""Stop, Start and Delete from every state of a workload container, each twice (field reports 2, 9, 10, 31 and 33)."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest
from scripted.compute_gateway import launch_authentication, ready
from scripted.retained import start, stop, stopped, wait_ready_again
from scripted.scripted_engine import ScriptedEngine

from driver_docker.engine_objects import ContainerStatus
from openshell.wire.compute.v1 import compute_driver_pb2 as pb

if TYPE_CHECKING:
    from scripted.compute_gateway import ComputeGateway
    from scripted.driver_bench import DriverBench

OK, MISSING, REFUSED = "OK", grpc.StatusCode.NOT_FOUND.name, grpc.StatusCode.FAILED_PRECONDITION.name


class Verb(StrEnum):
    STOP = "stop"
    START = "start"
    DELETE = "delete"


class State(StrEnum):
    CREATED = "created"
    RUNNING = "running"
    PAUSED = "paused"
    RESTARTING = "restarting"
    EXITED = "exited"
    DEAD = "dead"
    REMOVING = "removing"
    ABSENT = "absent"


def _documented() -> dict[tuple[Verb, State], tuple[str, str]]:
    """What a verb answers, and the Ready reason that follows; empty: no snapshot is promised."""
    text = (Path(__file__).parents[3] / "docs" / "driver-states.md").read_text(encoding="utf-8")
    section = text.split("## Verbs")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:3] == "| `"]
    answers = {}
    for state, *cells in rows:
        for verb, cell in zip(Verb, cells, strict=True):
            answer, _, reason = cell.partition(" → ")
            answers[verb, State(state.strip("`"))] = (answer, reason.strip("`"))
    return answers


ANSWERS = _documented()


def test_every_verb_is_documented_for_every_state() -> None:
    assert set(ANSWERS) == set(product(Verb, State))
    assert {answer for answer, _ in ANSWERS.values()} == {OK, MISSING, REFUSED}


@pytest.mark.parametrize(("verb", "state"), tuple(product(Verb, State)), ids=str)
async def test_a_verb_is_idempotent_from_every_state(bench: DriverBench, verb: Verb, state: State) -> None:
    engines: list[ScriptedEngine] = []

    def wrap(engine: object) -> ScriptedEngine:
        engines.append(ScriptedEngine(engine))  # type: ignore[arg-type]
        return engines[-1]

    async with bench.running(wrap=wrap) as (_, link):
        wanted = bench.sandbox()
        await _bring_to(bench, link, engines[0], wanted, state)
        runs = _started_at(bench, wanted.id)
        answer, reason = ANSWERS[verb, state]
        seen = len(link.events)
        for attempt in range(2):
            assert await _carry_out(link, verb, state, wanted.id, first=attempt == 0) == answer
            if reason == "BackendReady" and attempt == 0:
                await wait_ready_again(link, wanted.id, seen, failed_before=state is State.EXITED)
            if reason:
                got = await link.stub.GetSandbox(pb.GetSandboxRequest(sandbox_id=wanted.id))
                assert ready(got.sandbox).reason == reason
            if reason == "ContainerStopped":
                assert await stopped(link, wanted.id)
        if verb is Verb.START and state in {State.RUNNING, State.PAUSED, State.RESTARTING}:
            assert _started_at(bench, wanted.id) == runs, "a workload that runs is not started again"
        if verb is Verb.STOP and answer == OK:
            assert bench.container(wanted.id, "sandbox")["State"]["Running"] is False
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))
        await link.wait_deleted(wanted.id)
        assert bench.sandbox_left_over(wanted.id) == []


async def _bring_to(
    bench: DriverBench, link: ComputeGateway, engine: ScriptedEngine, wanted: pb.DriverSandbox, state: State
) -> None:
    if state is State.CREATED:
        with engine.hold("start_container", before=True) as held:
            await link.stub.CreateSandbox(pb.CreateSandboxRequest(sandbox=wanted))
            await held.reached.wait()
            await stop(link, wanted.id)
        assert bench.container(wanted.id, "sandbox")["State"]["Status"] == "created"
        return
    await bench.launch(link, wanted)
    workload = bench.container(wanted.id, "sandbox")["Id"]
    if state is State.PAUSED:
        bench.client.pause(workload)
        await link.wait_reason(wanted.id, "ContainerPaused")
    elif state is State.EXITED:
        bench.client.kill(workload, "SIGUSR1")
        await link.wait_reason(wanted.id, "ContainerExited")
    elif state is State.ABSENT:
        bench.client.remove_container(workload, force=True)
        await link.wait_reason(wanted.id, "ContainerExited")
    elif state is not State.RUNNING:  # the engine shows these only for a moment, or only when something is broken
        if state in {State.DEAD, State.REMOVING}:
            await stop(link, wanted.id)
        engine.states[workload] = ContainerStatus(state.value)


async def _carry_out(link: ComputeGateway, verb: Verb, state: State, sandbox_id: str, *, first: bool) -> str:
    try:
        if verb is Verb.STOP:
            await stop(link, sandbox_id)
        elif verb is Verb.START:
            ended = first and state in {State.CREATED, State.EXITED, State.DEAD, State.REMOVING, State.ABSENT}
            await start(link, sandbox_id, "g-2", launch_authentication(generation="g-2") if ended else None)
        else:
            answer = await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=sandbox_id))
            assert answer.deleted is first
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return OK


def _started_at(bench: DriverBench, sandbox_id: str) -> list[str]:
    rows = bench.client.containers(all=True, filters={"label": f"openshell.ai/sandbox-id={sandbox_id}"})
    return sorted(
        bench.client.inspect_container(row["Id"])["State"]["StartedAt"]
        for row in rows
        if row["Labels"]["openshell.ai/isolation-role"] == "sandbox"
    )


async def test_field_report_31_deletes_at_once_are_all_right_and_one_says_deleted(bench: DriverBench) -> None:
    async with bench.running() as (_, link):
        wanted = bench.sandbox()
        await bench.launch(link, wanted)
        answers = await asyncio.gather(
            *(link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id)) for _ in range(4))
        )
        assert sorted(answer.deleted for answer in answers) == [False, False, False, True]
        assert bench.sandbox_left_over(wanted.id) == []
