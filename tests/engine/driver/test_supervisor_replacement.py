"""The supervisor of a real, running sandbox is replaced; the gateway on both of its sides is the test."""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from scripted import driver_process
from scripted.compute_gateway import ComputeGateway, private_key_pem, ready, sandbox
from scripted.driver_bench import make_bench
from scripted.retained import refusal, start, stop, stopped, wait_ready_again
from scripted.stub_images import StubImages
from unit.supervisor.fake_gateway import FakeGateway

from openshell.isolation.documents import AuthBundle, LaunchAuthentication, VerificationKey
from openshell.isolation.tokens import TokenClaims, mint_gateway_token, mint_sandbox_token
from openshell.wire.compute.v1 import compute_driver_pb2 as pb
from supervisor_reference.policy import restrictive_default

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import AsyncIterator, Iterator

    from docker import APIClient
    from google.protobuf.message import Message
    from scripted.driver_bench import DriverBench
    from unit.supervisor.fake_gateway import Context

CODE = grpc.StatusCode
GENERATION = "g-1"
STATE_FILE = "/tmp/state"
AGENT = f"""
own=$(cat /proc/sys/kernel/random/uuid); n=0
while :; do n=$((n+1)); echo "$$ $own $n" > {STATE_FILE}.new; mv {STATE_FILE}.new {STATE_FILE}; sleep 0.02; done
"""
GOES_ON = f'was=$(cat {STATE_FILE}); until [ "$(cat {STATE_FILE})" != "$was" ]; do sleep 0.02; done; cat {STATE_FILE}'


@dataclass(frozen=True)
class Signer:
    """Signs credentials as the gateway of the test."""

    sandbox_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    session_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    key: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)

    @cached_property
    def first(self) -> LaunchAuthentication:
        """Those that the sandbox is created with."""
        return self.launch(1)

    def launch(self, epoch: int, *, generation: str = GENERATION, session_id: str = "") -> LaunchAuthentication:
        """Credentials of one epoch."""
        now = int(time.time())
        claims = TokenClaims(
            gateway_id="gateway-1",
            sandbox_id=self.sandbox_id,
            runtime_generation=generation,
            auth_epoch=epoch,
            token_id=str(uuid.uuid4()),
            issued_at=now,
            expires_at=now + 3600,
        )
        public = self.key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
        private = private_key_pem(self.key)
        return LaunchAuthentication(
            supervisor=AuthBundle(
                session_id=session_id or self.session_id,
                runtime_generation=generation,
                session_rotation=epoch,
                auth_epoch=epoch,
                gateway_token=mint_gateway_token(claims, key_id="k1", private_key_pem=private),
                gateway_expires_at=claims.expires_at,
                sandbox_token=mint_sandbox_token(claims, key_id="k1", private_key_pem=private),
                sandbox_expires_at=claims.expires_at,
            ),
            gateway_id="gateway-1",
            verification_keys=(VerificationKey(key_id="k1", public_key_pem=public),),
        )


class Gateway(FakeGateway):
    """Keeps the supervisor of one launch waiting, where a test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.held = asyncio.Event()
        """Set once that supervisor waits."""
        self._kept_waiting = ""

    def hold(self, gateway_token: str) -> None:
        """Never again answer who comes with this token."""
        self._kept_waiting = f"Bearer {gateway_token}"

    async def _take(self, method: str, request: Message, context: Context) -> None:
        metadata = dict(context.invocation_metadata() or ())
        if metadata.get("authorization") == self._kept_waiting:
            self.held.set()
            await asyncio.Event().wait()
        await super()._take(method, request, context)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """What the agent says of itself."""

    pid: str
    own: str
    """What it alone knows, from its start."""
    count: int

    def is_later_than(self, before: Agent) -> bool:
        """Whether it is the same process, which has gone on."""
        return (self.pid, self.own) == (before.pid, before.own) and self.count > before.count


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A sandbox whose agent runs, everything around it, and the driver's process."""

    bench: DriverBench
    gateway: Gateway
    link: ComputeGateway
    signer: Signer
    driver: Process

    async def agent(self) -> Agent:
        """The agent, once it has come a step further."""
        workload = self.bench.container(self.signer.sandbox_id, "sandbox")["Id"]
        look = self.bench.client.exec_create(workload, ["sh", "-c", GOES_ON])["Id"]
        async with asyncio.timeout(20):
            told = await asyncio.to_thread(self.bench.client.exec_start, look)
        pid, own, count = told.decode().split()
        return Agent(pid=pid, own=own, count=int(count))

    def containers(self) -> list[tuple[str, str]]:
        """Identity and start of workload and supervisor."""
        both = [self.bench.container(self.signer.sandbox_id, role) for role in ("sandbox", "supervisor")]
        return [(each["Id"], each["State"]["StartedAt"]) for each in both]

    async def start(self, launch: LaunchAuthentication, *, generation: str = "first") -> None:
        await start(self.link, self.signer.sandbox_id, generation, launch)

    async def start_and_wait(
        self, launch: LaunchAuthentication, *, generation: str = "first", failed_before: bool = False
    ) -> None:
        """Start, and wait until that start came through."""
        seen = len(self.link.events)
        await self.start(launch, generation=generation)
        await self.link.wait(
            lambda e: e.platform_event.event.reason == "Started" and any(x is e for _, x in self.link.events[seen:])
        )
        await wait_ready_again(self.link, self.signer.sandbox_id, seen, failed_before=failed_before)

    def told(self, seen: int) -> list[str]:
        """Reasons of the snapshots after those seen so far."""
        events = [event for _, event in self.link.events[seen:] if event.WhichOneof("payload") == "sandbox"]
        return [ready(event.sandbox.sandbox).reason for event in events]

    def warnings(self) -> list[str]:
        return [e.message for e in self.link.platform_events(self.signer.sandbox_id) if e.type == "Warning"]

    async def end(self) -> None:
        """Delete the sandbox, and end the driver in order."""
        request = pb.DeleteSandboxRequest(sandbox_id=self.signer.sandbox_id)
        assert (await self.link.stub.DeleteSandbox(request)).deleted
        assert await driver_process.end(self.driver) == 0


@pytest.fixture
def real_bench(
    docker_host: str, docker_client: APIClient, workload_image: str, runtime_image: str, supervisor_image: str
) -> Iterator[DriverBench]:
    """A bench with the real images."""
    images = StubImages(workload=workload_image, runtime=runtime_image, supervisor=supervisor_image, bare="")
    made = make_bench(docker_host, docker_client, images)
    yield made
    left = made.left_over()
    made.clear()
    assert left == []


@asynccontextmanager
async def _gateway() -> AsyncIterator[Gateway]:
    gateway = Gateway()
    gateway.configurations[0].policy.CopyFrom(restrictive_default())
    await gateway.start()
    try:
        yield gateway
    finally:
        await gateway.stop()


@asynccontextmanager
async def _driver(bench: DriverBench, gateway: Gateway) -> AsyncIterator[tuple[Process, ComputeGateway]]:
    flags = {"grpc-endpoint": gateway.url, "stop-grace-seconds": "2", "supervisor-stop-grace-seconds": "2"}
    async with (
        driver_process.serving(bench, **flags) as process,
        ComputeGateway(f"unix:{driver_process.socket_of(bench)}") as link,
    ):
        yield process, link


@asynccontextmanager
async def _running(bench: DriverBench, gateway: Gateway) -> AsyncIterator[Running]:
    async with _driver(bench, gateway) as (process, link):
        signer = Signer()
        wanted = sandbox(bench.images.workload)
        wanted.id = signer.sandbox_id
        wanted.spec.launch_authentication = signer.first.to_json()
        wanted.spec.command.extend(["sh", "-c", AGENT])
        observed = await bench.launch(link, wanted)
        assert ready(observed).reason == "BackendReady", ready(observed)
        yield Running(bench=bench, gateway=gateway, link=link, signer=signer, driver=process)


async def _left_by_a_killed_driver(
    bench: DriverBench, gateway: Gateway
) -> tuple[Running, Agent, list[tuple[str, str]]]:
    """A sandbox whose driver was killed, its agent, and its containers."""
    async with _running(bench, gateway) as run:
        agent, containers = await run.agent(), run.containers()
        await driver_process.kill(run.driver)
    return run, agent, containers


async def test_newer_credentials_replace_the_supervisor_and_the_agent_goes_on(real_bench: DriverBench) -> None:
    async with _gateway() as gateway, _running(real_bench, gateway) as run:
        session, agent = await gateway.sessions.get(), await run.agent()
        for epoch in (2, 3):
            workload, supervisor = run.containers()
            launch = run.signer.launch(epoch)
            await run.start_and_wait(launch)
            assert run.containers()[0] == workload
            assert run.containers()[1] != supervisor
            newer = await gateway.sessions.get()
            assert newer.hello.instance_id != session.hello.instance_id
            assert session.over.is_set()
            assert gateway.authorization_of("ConnectSupervisor")[-1] == f"Bearer {launch.supervisor.gateway_token}"
            before, agent, session = agent, await run.agent(), newer
            assert agent.is_later_than(before)
        assert run.warnings() == []
        await stop(run.link, run.signer.sandbox_id)
        assert await stopped(run.link, run.signer.sandbox_id)
        await run.start_and_wait(run.signer.launch(4, generation="g-2"), generation="g-2")
        assert (await run.agent()).own != agent.own, "a start after a stop is a new run"
        await run.end()


async def test_credentials_that_would_not_be_let_in_change_nothing(real_bench: DriverBench) -> None:
    async with _gateway() as gateway, _running(real_bench, gateway) as run:
        code, _ = await refusal(run.start(run.signer.launch(2, generation="g-9"), generation="g-9"))
        assert code is CODE.FAILED_PRECONDITION
        await run.start_and_wait(run.signer.launch(2))  # what was refused has not given the start its name
        await gateway.sessions.get()
        session = await gateway.sessions.get()
        agent, containers, seen = await run.agent(), run.containers(), len(run.link.events)
        for launch in (
            run.signer.launch(3, generation="g-2"),
            run.signer.launch(3, session_id=str(uuid.uuid4())),
            run.signer.launch(1),
            replace(run.signer, key=Ed25519PrivateKey.generate()).launch(3),
        ):
            code, _ = await refusal(run.start(launch))
            assert code is CODE.FAILED_PRECONDITION
        assert run.link.events[seen:] == []
        # A second supervisor of the same epoch would be refused by the workload: the one that works is kept.
        await run.start(run.signer.launch(2))
        assert run.containers() == containers
        assert not session.over.is_set()
        assert (await run.agent()).is_later_than(agent)
        assert run.told(seen) == ["BackendReady"]
        await run.start_and_wait(run.signer.launch(3))
        assert (await run.agent()).is_later_than(agent)
        await run.end()


async def test_a_driver_that_comes_back_without_the_supervisor_goes_on_with_newer_credentials(
    real_bench: DriverBench,
) -> None:
    async with _gateway() as gateway:
        run, agent, (workload, supervisor) = await _left_by_a_killed_driver(real_bench, gateway)
        gateway.hold(run.signer.first.supervisor.gateway_token)
        real_bench.client.remove_container(supervisor[0], force=True)
        async with _driver(real_bench, gateway) as (driver, link):
            run = replace(run, link=link, driver=driver)
            await gateway.held.wait()  # the supervisor is made again with the only credentials that the driver has
            await run.start_and_wait(run.signer.launch(2))
            assert run.containers()[0] == workload
            assert (await run.agent()).is_later_than(agent)
            assert run.warnings() == []
            await run.end()


async def test_a_driver_that_comes_back_without_the_supervisor_says_why_old_credentials_are_not_enough(
    real_bench: DriverBench,
) -> None:
    async with _gateway() as gateway:
        run, agent, (workload, supervisor) = await _left_by_a_killed_driver(real_bench, gateway)
        real_bench.client.remove_container(supervisor[0], force=True)
        async with _driver(real_bench, gateway) as (driver, link):
            run = replace(run, link=link, driver=driver)
            observed = await link.wait_reason(run.signer.sandbox_id, "ControlSupervisorExited")
            assert "attach" in ready(observed).message
            await run.start_and_wait(run.signer.launch(2, generation="g-2"), generation="g-2", failed_before=True)
            assert run.containers()[0][0] == workload[0]
            assert (await run.agent()).own != agent.own
            await run.end()
