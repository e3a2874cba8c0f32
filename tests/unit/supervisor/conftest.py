"""Fixtures of the supervisor's tests: a gateway on the real wire, launch material, short limits."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, NoReturn

import pytest
from unit.supervisor.fake_gateway import INSTANCE_ID, SANDBOX_ID, SANDBOX_NAME, TOKEN, FakeGateway
from unit.supervisor.launch_material import LaunchMaterial, make_launch

from supervisor_reference.grpc_gateway import GrpcGateway
from supervisor_reference.timing import Timing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path
    from types import FrameType


LONGEST_TEST_SECONDS = 40


def _out_of_time(number: int, frame: FrameType | None) -> NoReturn:
    raise TimeoutError(f"the test took more than {LONGEST_TEST_SECONDS} s")


@pytest.fixture(autouse=True)
def _bounded() -> Iterator[None]:
    """What is awaited here never comes where the behaviour is broken; that has to fail, not to hang."""
    before = signal.signal(signal.SIGALRM, _out_of_time)
    signal.alarm(LONGEST_TEST_SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def timing() -> Timing:
    """Limits that no test has to wait for."""
    return Timing(
        gateway_connect_seconds=0.3,
        gateway_call_seconds=5.0,
        refusal_report_seconds=2.0,
        first_backoff_seconds=0.01,
        last_backoff_seconds=0.05,
        control_socket_seconds=0.3,
        control_socket_pause_seconds=0.01,
        rejection_pause_seconds=0.01,
        first_conflict_pause_seconds=0.01,
        next_conflict_pause_seconds=0.01,
        last_reconnect_seconds=0.05,
    )


@pytest.fixture
async def fake() -> AsyncIterator[FakeGateway]:
    """A gateway that listens."""
    gateway = FakeGateway()
    await gateway.start()
    yield gateway
    await gateway.stop()


@pytest.fixture
async def gateway(fake: FakeGateway, timing: Timing, launch: LaunchMaterial) -> AsyncIterator[GrpcGateway]:
    """The supervisor's client of it."""
    client = GrpcGateway(
        launch.inputs(fake.url).endpoint,
        sandbox_id=SANDBOX_ID,
        sandbox_name=SANDBOX_NAME,
        instance_id=INSTANCE_ID,
        token=TOKEN,
        timing=timing,
    )
    yield client
    await client.close()


@pytest.fixture
def launch(tmp_path: Path) -> LaunchMaterial:
    """The material of one launch; its control socket lies in the test's folder."""
    return make_launch(str(tmp_path / "control.sock"))
