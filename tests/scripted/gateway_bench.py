"""A whole gateway in the test's process, with a scripted driver under it and users and supervisors in front."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Self

import grpc

from gateway_embedded.app import Gateway, utc_now
from gateway_embedded.config import DriverTimings, GatewayConfig
from openshell.wire.datamodel.v1.datamodel_pb2 import WorkspaceSelector
from openshell.wire.v1 import openshell_pb2 as pb
from openshell.wire.v1 import openshell_pb2_grpc as pb_grpc
from scripted.compute_driver import ScriptedDriver
from scripted.supervisor import ScriptedSupervisor

WORKSPACE = WorkspaceSelector(workspace="default")


class MovableClock:
    """The time, moved ahead by as much as a test says."""

    def __init__(self) -> None:
        self.ahead = timedelta()

    def __call__(self) -> datetime:
        """The time now."""
        return utc_now() + self.ahead


class GatewayBench:
    """A gateway in this process, a scripted driver under it, a user in front of it."""

    def __init__(self, folder: Path, *, config: dict[str, Any]) -> None:
        self.driver = ScriptedDriver()
        self.config = GatewayConfig(
            **{
                "listen_port": 0,
                "state_dir": folder / "state",
                "compute_driver_socket": folder / "driver.sock",
                "driver_timings": DriverTimings(dial_window_seconds=5, watch_reopen_seconds=0),
                **config,
            }
        )
        self.clock = MovableClock()
        self.gateway = Gateway(self.config, clock=self.clock)
        self.target = ""
        self._stack = AsyncExitStack()
        self._watched: list[pb.SandboxStreamEvent] = []

    async def __aenter__(self) -> Self:
        await self.driver.serve(self.config.compute_driver_socket)
        self._stack.push_async_callback(self.driver.close)
        await self.start_gateway()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def start_gateway(self) -> None:
        """Start a gateway on the same state folder."""
        self.gateway = Gateway(self.config, clock=self.clock)
        port = await self.gateway.start()
        self._stack.push_async_callback(self.gateway.stop)
        opened = self.driver.watches
        await self.gateway.connect()
        self.target = f"127.0.0.1:{port}"
        self.channel = grpc.aio.insecure_channel(self.target, options=(("grpc.use_local_subchannel_pool", 1),))
        self._stack.push_async_callback(self.channel.close)
        self.stub: pb_grpc.OpenShellAsyncStub = pb_grpc.OpenShellStub(self.channel)
        await self.driver.watch_open(opened + 1)

    async def create(self, name: str = "alpha", **fields: Any) -> pb.Sandbox:
        """Create a sandbox as a user."""
        fields.setdefault("spec", pb.SandboxSpec())
        answer = await self.stub.CreateSandbox(pb.CreateSandboxRequest(name=name, workspace_scope=WORKSPACE, **fields))
        return answer.sandbox

    async def get(self, name: str = "alpha") -> pb.Sandbox:
        """Read a sandbox as a user."""
        answer = await self.stub.GetSandbox(pb.GetSandboxRequest(name=name, workspace_scope=WORKSPACE))
        return answer.sandbox

    async def delete(self, name: str = "alpha", **fields: Any) -> pb.DeleteSandboxResponse:
        """Delete a sandbox as a user."""
        return await self.stub.DeleteSandbox(pb.DeleteSandboxRequest(name=name, workspace_scope=WORKSPACE, **fields))

    def watch(self, name: str = "alpha", **fields: Any) -> grpc.aio.UnaryStreamCall[Any, pb.SandboxStreamEvent]:
        """Watch a sandbox as a user."""
        request = pb.WatchSandboxRequest(sandbox=name, workspace_scope=WORKSPACE, **fields)
        call: grpc.aio.UnaryStreamCall[Any, pb.SandboxStreamEvent] = self.stub.WatchSandbox(request)
        return call

    async def until(self, test: Callable[[pb.Sandbox], bool], name: str = "alpha") -> pb.Sandbox:
        """Follow a sandbox until `test` holds."""
        call = self.watch(name, follow_status=True)
        try:
            async with asyncio.timeout(10):
                async for event in call:
                    if event.WhichOneof("payload") == "sandbox" and test(event.sandbox):
                        return event.sandbox
        finally:
            call.cancel()
        raise AssertionError(f"the watch of {name} ended with {await call.code()}")

    async def until_gone(self, name: str = "alpha") -> None:
        """Follow a sandbox until its record is erased."""
        call = self.watch(name, follow_status=True)
        try:
            async with asyncio.timeout(10):
                async for _ in call:
                    pass
        except grpc.aio.AioRpcError as error:
            assert error.code() == grpc.StatusCode.NOT_FOUND

    async def until_reason(self, reason: str, name: str = "alpha") -> pb.Sandbox:
        """Follow a sandbox until its Ready condition has that reason."""
        return await self.until(lambda sandbox: ready(sandbox).reason == reason, name)

    def supervisor(self, sandbox: pb.Sandbox) -> ScriptedSupervisor:
        """A supervisor with the credentials of the sandbox's newest launch."""
        created = next(item for item in reversed(self.driver.created) if item.id == sandbox.metadata.id)
        supervisor = ScriptedSupervisor(self.target, created)
        self._stack.push_async_callback(supervisor.close)
        return supervisor

    async def ready(self, name: str = "alpha", **fields: Any) -> tuple[pb.Sandbox, ScriptedSupervisor]:
        """A sandbox that became Ready, and its supervisor."""
        sandbox = await self.create(name, **fields)
        supervisor = self.supervisor(sandbox)
        self.driver.backend_ready(sandbox.metadata.id)
        await supervisor.run()
        return await self.until(lambda seen: seen.status.phase == pb.SANDBOX_PHASE_READY, name), supervisor


async def refused(call: Awaitable[Any], code: grpc.StatusCode, text: str = "") -> grpc.aio.AioRpcError:
    """A call that the gateway refuses with that code and a text that holds `text`."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        assert (error.code(), text in (error.details() or "")) == (code, True), error.details()
        return error
    raise AssertionError(f"not refused with {code.name}")


async def read(call: grpc.aio.UnaryStreamCall[Any, pb.SandboxStreamEvent]) -> pb.SandboxStreamEvent:
    """The next event of a stream."""
    event = await asyncio.wait_for(call.read(), 10)
    assert isinstance(event, pb.SandboxStreamEvent)
    return event


async def rest(call: grpc.aio.UnaryStreamCall[Any, pb.SandboxStreamEvent]) -> list[pb.SandboxStreamEvent]:
    """Everything that a stream still brings, until it ends; its code says how."""
    events: list[pb.SandboxStreamEvent] = []
    with contextlib.suppress(grpc.aio.AioRpcError):
        async with asyncio.timeout(10):
            while isinstance(event := await call.read(), pb.SandboxStreamEvent):
                events.append(event)
    return events


def ready(sandbox: pb.Sandbox) -> pb.SandboxCondition:
    """The Ready condition."""
    return condition_of(sandbox, "Ready")


def condition_of(sandbox: pb.Sandbox, kind: str) -> pb.SandboxCondition:
    """A condition by type; an empty one when there is none."""
    return next((item for item in sandbox.status.conditions if item.type == kind), pb.SandboxCondition())
