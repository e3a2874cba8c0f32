"""The session with the gateway: heartbeats, readiness, and what follows each way of ending."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

import grpc
import pytest
from unit.supervisor.fake_gateway import INSTANCE_ID, SANDBOX_ID, settled

from openshell.status import StatusCode
from openshell.verdicts import Category, Stage
from openshell.wire.v1 import openshell_pb2
from supervisor_reference.errors import StageError
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
    from collections.abc import AsyncIterator
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


@contextlib.asynccontextmanager
async def running(
    gateway: GrpcGateway, timing: Timing, health_socket: Path | None = None
) -> AsyncIterator[asyncio.Task[None]]:
    session = SupervisorSession(
        gateway, sandbox_id=SANDBOX_ID, instance_id=INSTANCE_ID, health_socket=health_socket, timing=timing
    )
    task = asyncio.create_task(session.run())
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
    fake.heartbeat_seconds = 0.02
    async with running(gateway, timing):
        session = await fake.sessions.get()
        assert (session.hello.sandbox_id, session.hello.instance_id) == (SANDBOX_ID, INSTANCE_ID)
        assert session.hello.connection_epoch == 1
        assert not session.hello.supports_config_push
        first, second = await session.heard.get(), await session.heard.get()
        assert first.WhichOneof("payload") == second.WhichOneof("payload") == "heartbeat"


async def test_is_ready_exactly_while_a_session_is_accepted(
    fake: FakeGateway, gateway: GrpcGateway, timing: Timing, tmp_path: Path
) -> None:
    socket = tmp_path / "run" / "health.sock"
    fake.answers_hello = False
    async with running(gateway, timing, socket) as task:
        session = await fake.sessions.get()
        assert not await is_ready(socket)
        session.send(openshell_pb2.GatewayMessage(session_accepted=openshell_pb2.SessionAccepted(session_id="s")))
        await settled(session)
        assert await is_ready(socket)
        session.end(grpc.StatusCode.OK)
        await task
        assert not socket.exists()


async def test_a_gateway_restart_is_survived(
    fake: FakeGateway, gateway: GrpcGateway, timing: Timing, tmp_path: Path
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


async def test_a_silent_gateway_is_given_up_after_three_heartbeats(
    fake: FakeGateway, gateway: GrpcGateway, timing: Timing
) -> None:
    fake.heartbeat_seconds = 0.03
    async with running(gateway, timing):
        silent = await fake.sessions.get()
        await fake.sessions.get()
        assert silent.heard.qsize() >= 2


async def test_a_gateway_that_is_heard_keeps_its_session(
    fake: FakeGateway, gateway: GrpcGateway, timing: Timing
) -> None:
    fake.heartbeat_seconds = 0.05
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
