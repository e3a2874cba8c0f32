"""The client's way through lost connections and renewed credentials (isolation contract 3.7)."""

from __future__ import annotations

import asyncio

import pytest
from scripted.isolation_boundary import POLICY, Boundary

from openshell.isolation.client import BackendClient
from openshell.isolation.connection_states import Connected
from openshell.isolation.errors import ProcessError, TokenError, TransportLostError
from openshell.isolation.operations import AgentSpec, ExitStatus, Signal

MAIN = "generation-1:main"


async def recovering(boundary: Boundary, *, recovery_seconds: float = 30.0) -> BackendClient:
    client = await BackendClient.connect(
        boundary.descriptor,
        boundary.descriptor.to_json(),
        sandbox_token=boundary.token(),
        supervisor_instance_id="instance-1",
        recovery_seconds=recovery_seconds,
    )
    boundary.clients.append(client)
    await client.attach(POLICY)
    await client.confirm()
    await client.start_agent(AgentSpec(program="/bin/true"), POLICY)
    return client


def cut(boundary: Boundary) -> None:
    """Lose every physical connection, as a network would."""
    for connection in boundary.server._terminator.connections:
        connection.close()


async def test_a_pending_wait_survives_a_lost_connection(boundary: Boundary) -> None:
    client = await recovering(boundary)
    waiting = asyncio.create_task(client.wait(MAIN))
    await boundary.backend.until("wait")
    cut(boundary)
    await boundary.backend.until("wait", times=2)
    assert not waiting.done()
    await client.signal(MAIN, Signal.TERM)
    assert await waiting == ExitStatus.signaled(15)
    calls = boundary.backend.calls
    assert calls.index("freeze") < calls.index("resume")
    assert (calls.count("attach"), calls.count("confirm"), calls.count("start_agent")) == (1, 1, 1)


async def test_concurrent_losses_make_one_replacement(boundary: Boundary) -> None:
    client = await recovering(boundary)
    waits = [asyncio.create_task(client.wait(MAIN)) for _ in range(4)]
    await boundary.backend.until("wait", times=4)
    cut(boundary)
    await boundary.backend.until("wait", times=8)
    assert client._keeper.current.generation == 2
    await client.signal(MAIN, Signal.TERM)
    assert await asyncio.gather(*waits) == [ExitStatus.signaled(15)] * 4


async def test_a_request_on_a_lost_connection_takes_effect_once(boundary: Boundary) -> None:
    client = await recovering(boundary)
    cut(boundary)
    await client.connection_lost.wait()
    await client.signal(MAIN, Signal.TERM)
    assert boundary.backend.calls.count("signal term") == 1
    assert isinstance(boundary.server.state.connection, Connected)


async def test_without_recovery_a_loss_is_final(boundary: Boundary) -> None:
    client = await recovering(boundary, recovery_seconds=0.0)
    cut(boundary)
    with pytest.raises(TransportLostError):
        await client.wait(MAIN)
    assert client._keeper.current.generation == 1


async def test_a_boundary_that_is_gone_is_given_up(boundary: Boundary) -> None:
    client = await recovering(boundary, recovery_seconds=0.05)
    await boundary.server.close()
    with pytest.raises(TransportLostError, match="not recovered within"):
        await client.wait(MAIN)


async def test_a_server_that_closes_has_lost_nothing(boundary: Boundary, caplog: pytest.LogCaptureFixture) -> None:
    client = await recovering(boundary)
    await boundary.server.close()
    await client.connection_lost.wait()
    assert "freeze" not in boundary.backend.calls
    assert [record.message for record in caplog.records if record.name.endswith("boundary_session")] == []


async def test_an_error_frame_is_final_and_costs_no_connection(boundary: Boundary) -> None:
    client = await recovering(boundary)
    await client.signal(MAIN, Signal.TERM)
    with pytest.raises(ProcessError, match="already started"):
        await client.start_agent(AgentSpec(program="/bin/true"), POLICY)
    assert client._keeper.current.generation == 1


async def test_a_token_of_the_same_epoch_stays_on_the_connection(boundary: Boundary) -> None:
    client = await recovering(boundary)
    renewed = boundary.token()
    await client.renew_token(renewed)
    await client.signal(MAIN, Signal.TERM)
    assert client._keeper.current.generation == 1
    assert boundary.backend.calls.count("confirm") == 1


async def test_a_token_of_a_newer_epoch_moves_without_freezing(boundary: Boundary) -> None:
    client = await recovering(boundary, recovery_seconds=0.0)
    waiting = asyncio.create_task(client.wait(MAIN))
    await boundary.backend.until("wait")
    await client.renew_token(boundary.token(auth_epoch=2))
    await boundary.backend.until("wait", times=2)
    await client.signal(MAIN, Signal.TERM)
    assert await waiting == ExitStatus.signaled(15)
    assert client._keeper.current.generation == 2
    assert "freeze" not in boundary.backend.calls


async def test_what_is_no_token_does_not_replace_one(boundary: Boundary) -> None:
    client = await recovering(boundary)
    with pytest.raises(TokenError):
        await client.renew_token("nonsense")
    with pytest.raises(TokenError):
        await client.renew_token(boundary.token(auth_epoch=2, sandbox_id="other"))
    await client.signal(MAIN, Signal.TERM)


async def test_losses_at_any_moment_are_told_as_losses(boundary: Boundary) -> None:
    for passes in range(25):
        client = await recovering(boundary, recovery_seconds=0.0) if passes == 0 else await boundary.connect()
        if passes:
            await client.attach(POLICY)
            await client.confirm()
        waiting = asyncio.create_task(client.wait(MAIN))
        for _ in range(passes):
            await asyncio.sleep(0)
        cut(boundary)
        with pytest.raises(TransportLostError):
            await waiting
        await client.close()


async def test_a_token_that_expires_is_told_as_such(boundary: Boundary) -> None:
    client = await recovering(boundary)
    client._keeper.current.use_token(boundary.token(sandbox_id="other"))
    with pytest.raises(TokenError, match="sandbox_id"):
        await client.signal(MAIN, Signal.TERM)
