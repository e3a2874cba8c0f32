"""The session with the gateway: heartbeats, readiness, and what follows each way of ending."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

import grpc
import pytest
from unit.supervisor.fake_gateway import INSTANCE_ID, SANDBOX_ID, settled

from openshell.isolation.errors import TransportLostError
from openshell.ready_line import READY_LINE
from openshell.status import StatusCode
from openshell.verdicts import Category, Stage
from openshell.wire.v1 import openshell_pb2
from supervisor_reference.errors import GatewayError, StageError
from supervisor_reference.probe import probe
from supervisor_reference.session import (
    GatewaySilent,
    GiveUp,
    NextStep,
    Reconnect,
    SessionEnd,
    SessionRejected,
    Stop,
    StreamClosed,
    StreamLost,
    SupervisorSession,
    after_session,
)
from supervisor_reference.timing import Timing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from unit.supervisor.fake_gateway import FakeGateway

    from supervisor_reference.grpc_gateway import GrpcGateway


def lost(status: StatusCode) -> StreamLost:
    return StreamLost(status=status, reason="words of the gateway")


@pytest.mark.parametrize(
    ("end", "attempt", "expected"),
    [
        (StreamClosed(), 0, Stop()),
        (lost(StatusCode.UNAVAILABLE), 0, Reconnect(pause_seconds=0.1)),
        (lost(StatusCode.UNAVAILABLE), 1, Reconnect(pause_seconds=0.1)),
        (lost(StatusCode.UNAVAILABLE), 2, Reconnect(pause_seconds=0.2)),
        (lost(StatusCode.UNAVAILABLE), 900, Reconnect(pause_seconds=5.0)),
        (lost(StatusCode.INTERNAL), 0, Reconnect(pause_seconds=0.1)),
        (lost(StatusCode.CANCELLED), 0, Reconnect(pause_seconds=0.1)),
        (GatewaySilent(seconds=30.0), 0, Reconnect(pause_seconds=0.1)),
        *(
            (
                lost(status),
                0,
                GiveUp(
                    category=category,
                    public=f"the gateway refused the supervisor's session with {status.name}",
                    private="words of the gateway",
                ),
            )
            for status, category in (
                (StatusCode.UNAUTHENTICATED, Category.INFRASTRUCTURE),
                (StatusCode.NOT_FOUND, Category.INFRASTRUCTURE),
                (StatusCode.FAILED_PRECONDITION, Category.INFRASTRUCTURE),
                (StatusCode.ABORTED, Category.INFRASTRUCTURE),
                (StatusCode.UNIMPLEMENTED, Category.INCOMPATIBLE),
            )
        ),
        (
            SessionRejected(reason="another instance"),
            1,
            GiveUp(
                category=Category.INFRASTRUCTURE,
                public="the gateway rejected the supervisor's session: another instance",
            ),
        ),
    ],
)
def test_decides_what_follows_a_session(end: SessionEnd, attempt: int, expected: NextStep) -> None:
    assert after_session(end, attempt=attempt, timing=Timing()) == expected


def test_a_refused_token_that_was_renewed_is_tried_again() -> None:
    refused = lost(StatusCode.UNAUTHENTICATED)
    assert after_session(refused, attempt=2, timing=Timing(), renewed=True) == Reconnect(pause_seconds=0.2)
    other = after_session(lost(StatusCode.NOT_FOUND), attempt=1, timing=Timing(), renewed=True)
    assert isinstance(other, GiveUp)


@contextlib.asynccontextmanager
async def running(
    gateway: GrpcGateway,
    timing: Timing,
    health_socket: Path | None = None,
    renew: Callable[[], Awaitable[None]] | None = None,
) -> AsyncIterator[asyncio.Task[None]]:
    session = SupervisorSession(
        gateway, sandbox_id=SANDBOX_ID, instance_id=INSTANCE_ID, health_socket=health_socket, timing=timing
    )
    task = asyncio.create_task(session.run(renew=renew))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})


async def is_ready(path: Path) -> bool:
    return await asyncio.to_thread(probe, ["--socket", str(path)]) == 0


async def test_says_hello_and_keeps_the_heartbeat_that_the_gateway_names(
    fake: FakeGateway, gateway: GrpcGateway, timing: Timing
) -> None:
    fake.heartbeat_seconds = 0.2
    async with running(gateway, timing):
        session = await fake.sessions.get()
        assert (session.hello.sandbox_id, session.hello.instance_id) == (SANDBOX_ID, INSTANCE_ID)
        assert session.hello.connection_epoch == 1
        assert not session.hello.supports_config_push
        first, second = await session.heard.get(), await session.heard.get()
        assert first.WhichOneof("payload") == second.WhichOneof("payload") == "heartbeat"


async def test_is_ready_exactly_while_a_session_is_accepted_and_says_so(
    fake: FakeGateway, gateway: GrpcGateway, timing: Timing, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    socket = tmp_path / "run" / "health.sock"
    fake.answers_hello = False
    async with running(gateway, timing, socket) as task:
        session = await fake.sessions.get()
        assert not await is_ready(socket)
        assert READY_LINE not in capsys.readouterr().err
        session.send(openshell_pb2.GatewayMessage(session_accepted=openshell_pb2.SessionAccepted(session_id="s")))
        await settled(session)
        assert await is_ready(socket)
        assert READY_LINE in capsys.readouterr().err.splitlines()
        session.end(grpc.StatusCode.OK)
        await task
        assert not socket.exists()


async def test_a_gateway_restart_is_survived_and_readiness_said_once(
    fake: FakeGateway, gateway: GrpcGateway, timing: Timing, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    socket = tmp_path / "health.sock"
    async with running(gateway, timing, socket) as task:
        await fake.sessions.get()
        await fake.stop()
        await fake.start(fake.port)
        again = await fake.sessions.get()
        assert again.hello.instance_id == INSTANCE_ID
        assert again.hello.connection_epoch > 1
        again.end(grpc.StatusCode.UNAVAILABLE)
        third = await fake.sessions.get()
        third.end(grpc.StatusCode.OK)
        await task
    assert capsys.readouterr().err.count(READY_LINE) == 1


async def test_a_silent_gateway_is_given_up_after_three_heartbeats(
    fake: FakeGateway, gateway: GrpcGateway, timing: Timing
) -> None:
    fake.heartbeat_seconds = 0.1
    async with running(gateway, timing):
        silent = await fake.sessions.get()
        await fake.sessions.get()
        assert silent.heard.qsize() >= 2


async def test_a_gateway_that_is_heard_keeps_its_session(
    fake: FakeGateway, gateway: GrpcGateway, timing: Timing
) -> None:
    fake.heartbeat_seconds = 0.2
    async with running(gateway, timing):
        session = await fake.sessions.get()
        for _ in range(8):  # well beyond three intervals
            await session.heard.get()
            session.send(openshell_pb2.GatewayMessage(heartbeat=openshell_pb2.GatewayHeartbeat()))
        assert not session.over.is_set()
        assert fake.sessions.empty()


async def test_an_orderly_close_ends_the_session_for_good(
    fake: FakeGateway, gateway: GrpcGateway, timing: Timing
) -> None:
    async with running(gateway, timing) as task:
        (await fake.sessions.get()).end(grpc.StatusCode.OK)
        await task
    assert len(fake.of("ConnectSupervisor")) == 1


async def test_a_relay_is_refused_rather_than_ignored(fake: FakeGateway, gateway: GrpcGateway, timing: Timing) -> None:
    async with running(gateway, timing):
        session = await fake.sessions.get()
        session.send(openshell_pb2.GatewayMessage(relay_open=openshell_pb2.RelayOpen(channel_id="c-7")))
        answer = (await session.heard.get()).relay_open_result
        assert (answer.channel_id, answer.success) == ("c-7", False)
        assert answer.error


async def test_a_rejection_is_final_and_carries_its_reason(
    fake: FakeGateway, gateway: GrpcGateway, timing: Timing
) -> None:
    fake.rejection = "restarting sandbox requires a fresh supervisor instance"
    async with running(gateway, timing) as task:
        with pytest.raises(StageError) as caught:
            await task
    assert caught.value.stage is Stage.READINESS
    assert "restarting sandbox requires a fresh supervisor instance" in caught.value.public
    assert len(fake.of("ConnectSupervisor")) == 1


async def test_a_lost_token_ends_a_running_session(fake: FakeGateway, gateway: GrpcGateway, timing: Timing) -> None:
    async with running(gateway, timing) as task:
        (await fake.sessions.get()).end(grpc.StatusCode.UNAUTHENTICATED)
        with pytest.raises(StageError) as caught:
            await task
    assert caught.value.stage is Stage.RUNNING
    assert "UNAUTHENTICATED" in caught.value.public


class Renewals:
    """Renewals that a test decides the outcome of; the last outcome stays."""

    def __init__(self, *outcomes: Exception | None) -> None:
        self.outcomes = list(outcomes)
        self.asked = 0

    async def __call__(self) -> None:
        self.asked += 1
        outcome = self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]
        if outcome is not None:
            raise outcome


def no_answer(status: StatusCode) -> GatewayError:
    return GatewayError("words of the gateway", operation="RefreshSandboxToken", detail="", status=status)


async def test_a_gateway_that_was_away_for_longer_than_a_token_lives_is_reached_again(
    fake: FakeGateway, gateway: GrpcGateway, timing: Timing
) -> None:
    renewals = Renewals(no_answer(StatusCode.UNAVAILABLE), None)
    async with running(gateway, timing, renew=renewals) as task:
        for outage in (2, 3):
            (await fake.sessions.get()).end(grpc.StatusCode.UNAVAILABLE)
            fake.failures["ConnectSupervisor"] = [(grpc.StatusCode.UNAUTHENTICATED, "expired")] * (4 - outage)
            session = await fake.sessions.get()
            await settled(session)
            assert renewals.asked == outage
            session.end(grpc.StatusCode.UNAVAILABLE)
        assert not task.done()


@pytest.mark.parametrize(
    "outcome",
    [
        pytest.param(None, id="the renewed token is refused too"),
        pytest.param(TransportLostError("reset"), id="so is it where the boundary did not take its one"),
        pytest.param(no_answer(StatusCode.UNAUTHENTICATED), id="the renewal is refused"),
        pytest.param(no_answer(StatusCode.UNIMPLEMENTED), id="there is no renewal"),
    ],
)
async def test_a_gateway_that_means_it_is_given_up(
    fake: FakeGateway, gateway: GrpcGateway, timing: Timing, outcome: Exception | None
) -> None:
    renewals = Renewals(outcome)
    fake.failures["ConnectSupervisor"] = [(grpc.StatusCode.UNAUTHENTICATED, "expired")] * 2
    async with running(gateway, timing, renew=renewals) as task:
        with pytest.raises(StageError, match="UNAUTHENTICATED"):
            await task
    assert renewals.asked == 1


async def test_the_first_session_has_to_be_accepted_in_time(
    fake: FakeGateway, gateway: GrpcGateway, timing: Timing
) -> None:
    fake.answers_hello = False
    async with running(gateway, replace(timing, first_session_seconds=0.05)) as task:
        with pytest.raises(StageError) as caught:
            await task
    assert caught.value.public == f"the gateway at {fake.url} accepted no session within 0.05 s"


async def test_readiness_that_cannot_be_served_is_a_failure(
    gateway: GrpcGateway, timing: Timing, tmp_path: Path
) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("")
    async with running(gateway, timing, occupied / "health.sock") as task:
        with pytest.raises(StageError, match="readiness cannot be served"):
            await task
