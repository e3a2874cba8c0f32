"""Renewal of the tokens."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import grpc
import pytest
from unit.supervisor.scripted_boundary import ScriptedBoundary

from openshell.isolation.errors import TransportLostError
from openshell.wire.v1 import openshell_pb2
from supervisor_reference.renewal import TokenRenewal, earliest_expiry, seconds_until_renewal
from supervisor_reference.timing import Timing

if TYPE_CHECKING:
    from unit.supervisor.fake_gateway import FakeGateway

    from supervisor_reference.grpc_gateway import GrpcGateway


@pytest.mark.parametrize(
    ("left", "expected"),
    [(3600.0, 3300.0), (900.0, 600.0), (300.0, 200.0), (0.3, 1.0), (0.0, 1.0), (-50.0, 1.0)],
)
def test_renews_with_a_margin_and_never_without_a_pause(left: float, expected: float) -> None:
    assert seconds_until_renewal(now=1000.0, expires_at=1000.0 + left, timing=Timing()) == pytest.approx(expected)


@pytest.fixture
def impatient(timing: Timing) -> Timing:
    return replace(timing, shortest_token_use_seconds=0.01, renewal_retry_seconds=0.01)


@pytest.fixture
async def boundary() -> ScriptedBoundary:
    return ScriptedBoundary()


def tokens(number: int, *, expires: bool, sandbox_token: str = "") -> openshell_pb2.RefreshSandboxTokenResponse:
    answer = openshell_pb2.RefreshSandboxTokenResponse(token=f"gateway-token-{number}", sandbox_token=sandbox_token)
    if expires:
        answer.expiration_time.FromDatetime(datetime.fromtimestamp(time.time(), UTC))
    return answer


async def test_each_renewed_token_is_used_from_then_on(
    fake: FakeGateway, gateway: GrpcGateway, boundary: ScriptedBoundary, impatient: Timing
) -> None:
    fake.refreshed = [tokens(1, expires=True), tokens(2, expires=False)]
    fake.failures["RefreshSandboxToken"] = [(grpc.StatusCode.RESOURCE_EXHAUSTED, "busy")]
    await TokenRenewal(gateway, boundary, expires_at=int(time.time()), timing=impatient).keep()
    await gateway.fetch_configuration()
    assert [fake.authorization_of(name) for name in ("RefreshSandboxToken", "GetSandboxConfig")] == [
        ["Bearer gateway-token-0", "Bearer gateway-token-0", "Bearer gateway-token-1"],
        ["Bearer gateway-token-2"],
    ]


async def test_a_gateway_without_renewal_is_asked_once(
    fake: FakeGateway, gateway: GrpcGateway, boundary: ScriptedBoundary, impatient: Timing
) -> None:
    await TokenRenewal(gateway, boundary, expires_at=int(time.time()), timing=impatient).keep()
    assert len(fake.of("RefreshSandboxToken")) == 1


async def test_a_token_that_never_expires_is_left_alone(
    fake: FakeGateway, gateway: GrpcGateway, boundary: ScriptedBoundary, impatient: Timing
) -> None:
    await TokenRenewal(gateway, boundary, expires_at=0, timing=impatient).keep()
    assert not fake.of("RefreshSandboxToken")


async def test_the_boundary_gets_each_sandbox_token_and_a_fresh_one_after_it_failed(
    fake: FakeGateway, gateway: GrpcGateway, boundary: ScriptedBoundary, impatient: Timing
) -> None:
    fake.refreshed = [
        tokens(1, expires=True, sandbox_token="sandbox-1"),
        tokens(2, expires=True, sandbox_token="sandbox-2"),
        tokens(3, expires=True),
        tokens(4, expires=False, sandbox_token="sandbox-4"),
    ]
    boundary.renewal_errors = [TransportLostError("reset")]
    await TokenRenewal(gateway, boundary, expires_at=int(time.time()), timing=impatient).keep()
    assert boundary.tokens == ["sandbox-1", "sandbox-2", "sandbox-4"]


async def test_a_sandbox_token_that_expires_sooner_is_renewed_in_time(
    fake: FakeGateway, gateway: GrpcGateway, boundary: ScriptedBoundary, impatient: Timing
) -> None:
    sooner = tokens(1, expires=False, sandbox_token="sandbox-1")
    sooner.sandbox_expiration_time.FromDatetime(datetime.fromtimestamp(time.time(), UTC))
    sooner.expiration_time.FromDatetime(datetime.fromtimestamp(time.time() + 3600, UTC))
    fake.refreshed = [sooner, tokens(2, expires=False, sandbox_token="sandbox-2")]
    await TokenRenewal(gateway, boundary, expires_at=int(time.time()), timing=impatient).keep()
    assert boundary.tokens == ["sandbox-1", "sandbox-2"]


async def test_a_time_that_does_not_exist_is_an_answer_to_be_asked_again_and_changes_nothing(
    fake: FakeGateway, gateway: GrpcGateway, boundary: ScriptedBoundary, impatient: Timing
) -> None:
    strange = tokens(1, expires=True, sandbox_token="sandbox-1")
    strange.expiration_time.seconds = 2**62
    fake.refreshed = [strange, tokens(2, expires=False, sandbox_token="sandbox-2")]
    await TokenRenewal(gateway, boundary, expires_at=int(time.time()), timing=impatient).keep()
    assert boundary.tokens == ["sandbox-2"]
    assert fake.authorization_of("RefreshSandboxToken") == ["Bearer gateway-token-0"] * 2


async def test_a_renewal_that_was_asked_for_meanwhile_replaces_the_planned_one(
    fake: FakeGateway, gateway: GrpcGateway, boundary: ScriptedBoundary, impatient: Timing
) -> None:
    fake.refreshed = [tokens(1, expires=False, sandbox_token="sandbox-1")]
    timing = replace(impatient, shortest_token_use_seconds=0.2)
    renewal = TokenRenewal(gateway, boundary, expires_at=int(time.time()), timing=timing)
    keeping = asyncio.create_task(renewal.keep())
    await asyncio.sleep(0)
    await renewal.renew()
    await keeping
    assert boundary.tokens == ["sandbox-1"]
    assert len(fake.of("RefreshSandboxToken")) == 1


@pytest.mark.parametrize(("expiries", "first"), [((0, 0), 0), ((7, 0), 7), ((0, 7), 7), ((9, 7), 7), ((), 0)])
def test_the_first_expiry_counts_and_never_is_none(expiries: tuple[int, ...], first: int) -> None:
    assert earliest_expiry(*expiries) == first
