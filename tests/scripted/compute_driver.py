"""A compute driver that does what a test tells it, over a real grpc server on a Unix socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc

from openshell.wire.compute.v1 import compute_driver_pb2 as pb
from openshell.wire.compute.v1 import compute_driver_pb2_grpc as pb_grpc
from openshell.wire.extension.v1 import extension_pb2

DEFAULT_ACKNOWLEDGEMENT = (
    'v1:{"allow_driver_config":false,"resource_admission":{"enabled":true,"required_labels":'
    '{"openshell.ai/sandbox-attachable":"true","openshell.ai/sandbox-attachable-workspace":"${workspace}"}}}'
)

Context = grpc.aio.ServicerContext[Any, Any]


class ScriptedDriver(pb_grpc.ComputeDriverServicer):
    """Records what it is asked and answers from its fields; `publish` feeds every open watch."""

    def __init__(self) -> None:
        self.sandboxes: dict[str, pb.DriverSandbox] = {}
        self.created: list[pb.DriverSandbox] = []
        self.validated: list[pb.DriverSandbox] = []
        self.deleted: list[str] = []
        self.stopped: list[str] = []
        self.hello: list[pb.GetCapabilitiesRequest] = []
        self.failures: dict[str, tuple[grpc.StatusCode, str]] = {}
        self.delete_answers = True
        self.announces_deletion = True
        self.gates: dict[str, asyncio.Event] = {}
        self._entered: dict[str, asyncio.Event] = {}
        self.watches = 0
        self.watch_opened = asyncio.Condition()
        self.capabilities = pb.GetCapabilitiesResponse(
            driver_name="scripted",
            driver_version="1.2.3",
            default_image="demo:latest",
            gateway_manages_lifecycle=True,
            extension=extension_pb2.PeerMetadata(
                protocol_version=extension_pb2.ProtocolVersion(major=1, minor=0),
                implementation_name="scripted/driver",
                implementation_version="1.2.3",
                supported_capabilities=["openshell.compute.contract"],
                required_capabilities=["openshell.compute.contract", "openshell.compute.launch-authentication"],
            ),
            resource_admission_policy=DEFAULT_ACKNOWLEDGEMENT,
        )
        self._readers: set[asyncio.Queue[pb.WatchSandboxesEvent | None]] = set()
        self._server: grpc.aio.Server | None = None

    async def serve(self, socket: Path) -> None:
        """Bind the socket."""
        self._server = grpc.aio.server()
        pb_grpc.add_ComputeDriverServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{socket}")
        await self._server.start()

    async def close(self) -> None:
        """End at once, as a crash would."""
        self.end_watches()
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    def publish(self, event: pb.WatchSandboxesEvent) -> None:
        """Send an event to every open watch."""
        for reader in self._readers:
            reader.put_nowait(event)

    def end_watches(self) -> None:
        """End every open watch in order."""
        for reader in self._readers:
            reader.put_nowait(None)

    async def watch_open(self, count: int = 1) -> None:
        """Wait until the gateway has opened that many watches since the start."""
        async with self.watch_opened:
            await self.watch_opened.wait_for(lambda: self.watches >= count)

    def snapshot(
        self, sandbox_id: str, *conditions: pb.DriverCondition, deleting: bool = False, publish: bool = True
    ) -> pb.DriverSandbox:
        """Change what the driver observes of a sandbox, and tell it."""
        wanted = next(item for item in self.created if item.id == sandbox_id)
        status = pb.DriverSandboxStatus(
            name=f"openshell-{wanted.name}",
            instance_id=f"container-of-{wanted.name}",
            conditions=conditions,
            deleting=deleting,
        )
        seen = pb.DriverSandbox(
            id=sandbox_id, name=wanted.name, workspace=wanted.workspace, namespace="default", status=status
        )
        self.sandboxes[sandbox_id] = seen
        if publish:
            self.publish(pb.WatchSandboxesEvent(sandbox=pb.WatchSandboxesSandboxEvent(sandbox=seen)))
        return seen

    def backend_ready(self, sandbox_id: str) -> None:
        """Say that the workload container runs."""
        self.snapshot(sandbox_id, condition("True", "BackendReady", "Container is running"))

    def event(self, sandbox_id: str, event: pb.DriverPlatformEvent) -> None:
        """Send a platform event."""
        self.publish(
            pb.WatchSandboxesEvent(platform_event=pb.WatchSandboxesPlatformEvent(sandbox_id=sandbox_id, event=event))
        )

    def gone(self, sandbox_id: str) -> None:
        """Send a deletion."""
        self.sandboxes.pop(sandbox_id, None)
        self.publish(pb.WatchSandboxesEvent(deleted=pb.WatchSandboxesDeletedEvent(sandbox_id=sandbox_id)))

    async def entered(self, rpc: str) -> None:
        """Wait until the gateway has called that RPC at least once."""
        await self._entered.setdefault(rpc, asyncio.Event()).wait()

    async def _enter(self, rpc: str, context: Context) -> None:
        self._entered.setdefault(rpc, asyncio.Event()).set()
        gate = self.gates.get(rpc)
        if gate is not None:
            await gate.wait()
        if rpc in self.failures:
            await context.abort(*self.failures[rpc])

    async def GetCapabilities(self, request: pb.GetCapabilitiesRequest, context: Context) -> pb.GetCapabilitiesResponse:
        self.hello.append(request)
        await self._enter("GetCapabilities", context)
        return self.capabilities

    async def AuthenticateSandbox(self, request: Any, context: Context) -> pb.AuthenticateSandboxResponse:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "not offered")
        raise AssertionError

    async def ValidateSandboxCreate(
        self, request: pb.ValidateSandboxCreateRequest, context: Context
    ) -> pb.ValidateSandboxCreateResponse:
        self.validated.append(request.sandbox)
        await self._enter("ValidateSandboxCreate", context)
        return pb.ValidateSandboxCreateResponse()

    async def CreateSandbox(self, request: pb.CreateSandboxRequest, context: Context) -> pb.CreateSandboxResponse:
        self.created.append(request.sandbox)
        await self._enter("CreateSandbox", context)
        self.snapshot(request.sandbox.id, condition("False", "Starting", "Container is being created"))
        return pb.CreateSandboxResponse()

    async def GetSandbox(self, request: pb.GetSandboxRequest, context: Context) -> pb.GetSandboxResponse:
        await self._enter("GetSandbox", context)
        if request.sandbox_id not in self.sandboxes:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such sandbox")
        return pb.GetSandboxResponse(sandbox=self.sandboxes[request.sandbox_id])

    async def ListSandboxes(self, request: pb.ListSandboxesRequest, context: Context) -> pb.ListSandboxesResponse:
        await self._enter("ListSandboxes", context)
        return pb.ListSandboxesResponse(sandboxes=self.sandboxes.values())

    async def StopSandbox(self, request: pb.StopSandboxRequest, context: Context) -> pb.StopSandboxResponse:
        self.stopped.append(request.sandbox_id)
        await self._enter("StopSandbox", context)
        return pb.StopSandboxResponse()

    async def StartSandbox(self, request: Any, context: Context) -> pb.StartSandboxResponse:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "not offered")
        raise AssertionError

    async def DeleteSandbox(self, request: pb.DeleteSandboxRequest, context: Context) -> pb.DeleteSandboxResponse:
        self.deleted.append(request.sandbox_id)
        await self._enter("DeleteSandbox", context)
        if self.delete_answers and self.announces_deletion:
            self.gone(request.sandbox_id)
        else:
            self.sandboxes.pop(request.sandbox_id, None)
        return pb.DeleteSandboxResponse(deleted=self.delete_answers)

    async def WatchSandboxes(
        self, request: pb.WatchSandboxesRequest, context: Context
    ) -> AsyncIterator[pb.WatchSandboxesEvent]:
        reader: asyncio.Queue[pb.WatchSandboxesEvent | None] = asyncio.Queue()
        self._readers.add(reader)
        try:
            async with self.watch_opened:
                self.watches += 1
                self.watch_opened.notify_all()
            for sandbox in tuple(self.sandboxes.values()):
                yield pb.WatchSandboxesEvent(sandbox=pb.WatchSandboxesSandboxEvent(sandbox=sandbox))
            while (event := await reader.get()) is not None:
                yield event
        finally:
            self._readers.discard(reader)

    async def EnsureWorkspace(self, request: Any, context: Context) -> pb.EnsureWorkspaceResponse:
        return pb.EnsureWorkspaceResponse()

    async def DeleteWorkspace(self, request: Any, context: Context) -> pb.DeleteWorkspaceResponse:
        return pb.DeleteWorkspaceResponse()


def condition(status: str, reason: str, message: str = "", *, kind: str = "Ready") -> pb.DriverCondition:
    """A condition of a snapshot."""
    return pb.DriverCondition(type=kind, status=status, reason=reason, message=message)
