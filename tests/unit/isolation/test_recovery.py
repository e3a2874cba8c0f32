"""The client's way through lost connections and renewed credentials (isolation contract 3.7)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import MethodType

import pytest
from scripted.isolation_boundary import POLICY, Boundary

from openshell.isolation.boundary_connection import BoundaryConnection
from openshell.isolation.client import BackendClient
from openshell.isolation.connection_states import Connected
from openshell.isolation.envelope import RequestEnvelope
from openshell.isolation.errors import (
    ConfirmError,
    DescriptorError,
    ProcessError,
    TokenError,
    TransportLostError,
    UnavailableError,
)
from openshell.isolation.operations import (
    AgentSpec,
    Attached,
    Confirmed,
    EnforcedProperty,
    ExitStatus,
    Result,
    Signal,
    Signaled,
    Wait,
)

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


def hours_pass(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A clock of the event loop that can be set forward."""
    loop = asyncio.get_running_loop()
    ahead = 0.0
    monkeypatch.setattr(loop, "time", lambda: time.monotonic() + ahead)

    def advance(seconds: float) -> None:
        nonlocal ahead
        ahead += seconds

    return advance


async def cut_and_wait(boundary: Boundary, client: BackendClient) -> None:
    lost = client.connection_lost
    cut(boundary)
    await lost.wait()


async def test_each_outage_of_a_long_wait_has_its_own_window(
    boundary: Boundary, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await recovering(boundary)
    advance = hours_pass(monkeypatch)
    waiting = asyncio.create_task(client.wait(MAIN))
    await boundary.backend.until("wait")
    open_connection = BoundaryConnection.open
    refusals = 0

    async def busy_once(*args: object, **kwargs: object) -> BoundaryConnection:
        nonlocal refusals
        refusals += 1
        if refusals % 2:
            raise UnavailableError("another connection with this epoch is still active")
        return await open_connection(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(BoundaryConnection, "open", busy_once)
    for outage in range(1, 4):
        cut(boundary)
        await boundary.backend.until("wait", times=1 + outage)
        advance(60.0)
    assert not waiting.done()
    await client.signal(MAIN, Signal.TERM)
    assert await waiting == ExitStatus.signaled(15)
    assert refusals == 6


async def test_a_stream_that_fails_an_hour_later_is_tried_again_on_its_live_connection(
    boundary: Boundary, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await recovering(boundary)
    advance = hours_pass(monkeypatch)
    exchange = client._keeper.current.exchange
    failing = 3
    healed = asyncio.Event()

    async def breaks(_: BoundaryConnection, envelope: RequestEnvelope, *, timeout_seconds: float | None) -> Result:
        nonlocal failing
        if envelope.request["operation"] != "wait":
            return await exchange(envelope, timeout_seconds=timeout_seconds)
        if failing == 0:
            healed.set()
            return await exchange(envelope, timeout_seconds=timeout_seconds)
        failing -= 1
        advance(3600.0)
        raise TransportLostError("the stream was reset")

    monkeypatch.setattr(client._keeper.current, "exchange", MethodType(breaks, client._keeper.current))
    waiting = asyncio.create_task(client.wait(MAIN))
    await asyncio.wait({waiting, healing := asyncio.ensure_future(healed.wait())}, return_when=asyncio.FIRST_COMPLETED)
    healing.cancel()
    await boundary.backend.until("wait")
    await client.signal(MAIN, Signal.TERM)
    assert await waiting == ExitStatus.signaled(15)
    assert client._keeper.current.generation == 1


async def test_a_stream_that_always_fails_at_once_is_given_up(boundary: Boundary) -> None:
    client = await recovering(boundary, recovery_seconds=0.3)
    exchange = client._keeper.current.exchange

    async def breaks(_: BoundaryConnection, envelope: RequestEnvelope, *, timeout_seconds: float | None) -> Result:
        if envelope.request["operation"] == "wait":
            raise TransportLostError("the stream was reset")
        return await exchange(envelope, timeout_seconds=timeout_seconds)

    client._keeper.current.exchange = MethodType(breaks, client._keeper.current)  # type: ignore[method-assign]
    with pytest.raises(TransportLostError, match="the stream was reset"):
        await client.wait(MAIN)


@pytest.mark.parametrize("silent", ["attach", "confirm"])
async def test_a_boundary_that_connects_and_says_nothing_is_given_up_in_time(
    boundary: Boundary, monkeypatch: pytest.MonkeyPatch, silent: str
) -> None:
    client = await recovering(boundary)
    advance = hours_pass(monkeypatch)
    exchange = BoundaryConnection.exchange
    asked = asyncio.Event()

    async def says_nothing(
        connection: BoundaryConnection, envelope: RequestEnvelope, *, timeout_seconds: float | None
    ) -> Result:
        if envelope.request["operation"] == silent:
            asked.set()
            await asyncio.Event().wait()
        return await exchange(connection, envelope, timeout_seconds=timeout_seconds)

    monkeypatch.setattr(BoundaryConnection, "exchange", says_nothing)
    await cut_and_wait(boundary, client)
    waiting = asyncio.create_task(client.wait(MAIN))
    await asked.wait()
    advance(31.0)
    with pytest.raises(TransportLostError, match="not recovered within 30 seconds"):
        async with asyncio.timeout(10):
            await waiting


def weakened(result: Result) -> Result:
    """What a boundary would answer that no longer confines the filesystem."""
    if not isinstance(result, Confirmed):
        return result
    properties = replace(
        result.confirmation.properties, filesystem_confinement=EnforcedProperty(enforced=False, mechanism="none")
    )
    return Confirmed(confirmation=replace(result.confirmation, properties=properties))


def weaken(monkeypatch: pytest.MonkeyPatch, change: Callable[[Result], Result] = weakened) -> None:
    exchange = BoundaryConnection.exchange

    async def changed(
        connection: BoundaryConnection, envelope: RequestEnvelope, *, timeout_seconds: float | None
    ) -> Result:
        return change(await exchange(connection, envelope, timeout_seconds=timeout_seconds))

    monkeypatch.setattr(BoundaryConnection, "exchange", changed)


async def is_over(boundary: Boundary, client: BackendClient) -> None:
    """The connection is closed, and nothing is asked of this boundary any more, whatever is called."""
    async with asyncio.timeout(10):
        await client.connection_lost.wait()
    attempts: tuple[Callable[[], Awaitable[object]], ...] = (
        lambda: client.signal(MAIN, Signal.TERM),
        client.terminate_boundary,
        lambda: client.renew_token(boundary.token()),
        lambda: client.renew_token(boundary.token(auth_epoch=2)),
    )
    for attempt in attempts:
        with pytest.raises(ConfirmError, match="filesystem_confinement"):
            await attempt()


async def test_weaker_evidence_after_a_loss_ends_the_use_of_a_boundary(
    boundary: Boundary, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await recovering(boundary)
    weaken(monkeypatch)
    await cut_and_wait(boundary, client)
    with pytest.raises(ConfirmError, match="does not enforce filesystem_confinement"):
        await client.wait(MAIN)
    monkeypatch.undo()
    await is_over(boundary, client)
    assert "signal term" not in boundary.backend.calls


async def test_weaker_evidence_in_a_probe_ends_the_use_of_a_boundary(
    boundary: Boundary, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await recovering(boundary)
    weaken(monkeypatch)

    async def breaks(_: BoundaryConnection, envelope: RequestEnvelope, *, timeout_seconds: float | None) -> Result:
        if envelope.request["operation"] == "wait":
            raise TransportLostError("the stream was reset")
        return await BoundaryConnection.exchange(client._keeper.current, envelope, timeout_seconds=timeout_seconds)

    client._keeper.current.exchange = MethodType(breaks, client._keeper.current)  # type: ignore[method-assign]
    with pytest.raises(ConfirmError, match="filesystem_confinement"):
        await client.wait(MAIN)
    await is_over(boundary, client)


@pytest.mark.parametrize("epoch", [1, 2])
async def test_weaker_evidence_in_a_renewal_ends_the_use_of_a_boundary(
    boundary: Boundary, monkeypatch: pytest.MonkeyPatch, epoch: int
) -> None:
    client = await recovering(boundary)
    waiting = asyncio.create_task(client.wait(MAIN))
    await boundary.backend.until("wait")
    weaken(monkeypatch)
    with pytest.raises(ConfirmError, match="filesystem_confinement"):
        await client.renew_token(boundary.token(auth_epoch=epoch))
    with pytest.raises(ConfirmError, match="filesystem_confinement"):
        await waiting


async def test_a_replacement_of_another_generation_is_refused(
    boundary: Boundary, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await recovering(boundary)

    def of_another(result: Result) -> Result:
        if not isinstance(result, Attached):
            return result
        return Attached(snapshot=replace(result.snapshot, generation="generation-2"))

    weaken(monkeypatch, of_another)
    await cut_and_wait(boundary, client)
    with pytest.raises(DescriptorError, match="attached another generation"):
        await client.wait(MAIN)


@pytest.mark.parametrize("replayed", [Attached, Confirmed])
async def test_a_replay_that_is_answered_with_something_else_is_refused(
    boundary: Boundary, monkeypatch: pytest.MonkeyPatch, replayed: type[Result]
) -> None:
    client = await recovering(boundary)
    weaken(monkeypatch, lambda result: Signaled() if isinstance(result, replayed) else result)
    await cut_and_wait(boundary, client)
    with pytest.raises(DescriptorError, match="answered a replay with signaled"):
        await client.wait(MAIN)


async def test_a_renewed_token_that_is_refused_leaves_the_one_before_in_use(boundary: Boundary) -> None:
    client = await recovering(boundary)
    with pytest.raises(TokenError):
        await client.renew_token(boundary.token(sandbox_id="other"))
    await client.signal(MAIN, Signal.TERM)
    assert boundary.backend.calls.count("signal term") == 1


async def test_a_refusal_that_comes_while_the_request_is_being_sent_is_told(boundary: Boundary) -> None:
    client = await recovering(boundary)
    connection = client._keeper.current
    connection.use_token(boundary.token(sandbox_id="other"))
    request = RequestEnvelope.of(Wait(process_id="p" * 500_000))
    for _ in range(20):
        with pytest.raises(TokenError, match="sandbox_id"):
            await connection.exchange(request, timeout_seconds=10)
    assert not connection.closed.is_set()
