"""A gateway over the real wire whose answers a test decides."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import grpc
from google.protobuf.duration_pb2 import Duration

from openshell.wire.sandbox.v1 import sandbox_pb2
from openshell.wire.v1 import openshell_pb2, openshell_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from google.protobuf.message import Message

    Context = grpc.aio.ServicerContext[Message, Message]
    _Servicer = object
else:
    _Servicer = openshell_pb2_grpc.OpenShellServicer

TOKEN = "gateway-token-0"
SANDBOX_ID = "sb-1"
SANDBOX_NAME = "first"
INSTANCE_ID = "22222222-2222-4222-8222-222222222222"


def a_policy() -> sandbox_pb2.SandboxPolicy:
    """A policy that a boundary can enforce."""
    return sandbox_pb2.SandboxPolicy(
        version=1,
        filesystem=sandbox_pb2.FilesystemPolicy(include_workdir=True, read_only=["/usr"], read_write=["/tmp"]),
        landlock=sandbox_pb2.LandlockPolicy(compatibility="hard_requirement"),
    )


def a_configuration() -> sandbox_pb2.GetSandboxConfigResponse:
    """An admitted configuration, revision 3."""
    return sandbox_pb2.GetSandboxConfigResponse(
        policy=a_policy(),
        version=3,
        policy_hash="abc",
        config_revision=7,
        provider_env_revision=1,
        configuration_admitted=True,
        configuration_instance_id="11111111-1111-4111-8111-111111111111",
        workspace="default",
    )


@dataclass(eq=False)
class FakeSession:
    """One ConnectSupervisor stream as the gateway sees it."""

    hello: openshell_pb2.SupervisorHello
    heard: asyncio.Queue[openshell_pb2.SupervisorMessage] = field(default_factory=asyncio.Queue)
    to_send: asyncio.Queue[openshell_pb2.GatewayMessage | grpc.StatusCode] = field(default_factory=asyncio.Queue)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def send(self, message: openshell_pb2.GatewayMessage) -> None:
        """Send a message to the supervisor."""
        self.to_send.put_nowait(message)

    def end(self, status: grpc.StatusCode) -> None:
        """End the stream with a status."""
        self.to_send.put_nowait(status)


async def settled(session: FakeSession) -> None:
    """Wait until the supervisor has taken in everything that was sent to it, its acceptance included."""
    session.send(openshell_pb2.GatewayMessage(relay_open=openshell_pb2.RelayOpen(channel_id="settle")))
    while (await session.heard.get()).WhichOneof("payload") != "relay_open_result":
        pass


class FakeGateway(_Servicer):
    """Records every call and answers what the test has set."""

    def __init__(self) -> None:
        self.configurations: list[sandbox_pb2.GetSandboxConfigResponse] = [a_configuration()]
        """What GetSandboxConfig answers, one after the other; the last one stays."""
        self.failures: dict[str, list[tuple[grpc.StatusCode, str]]] = defaultdict(list)
        """Errors that the next calls of a method answer with."""
        self.calls: list[tuple[str, Message]] = []
        self.authorizations: list[tuple[str, str]] = []
        self.environment = openshell_pb2.GetSandboxProviderEnvironmentResponse(provider_env_revision=1)
        self.heartbeat_seconds = 10.0
        self.answers_hello = True
        self.rejection: str | None = None
        self.refreshed: list[openshell_pb2.RefreshSandboxTokenResponse] = []
        self.sessions: asyncio.Queue[FakeSession] = asyncio.Queue()
        self._changed = asyncio.Condition()
        self._server: grpc.aio.Server | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self, port: int = 0) -> None:
        """Listen; on the port of an earlier start when one is given."""
        self._server = grpc.aio.server()
        openshell_pb2_grpc.add_OpenShellServicer_to_server(
            cast("openshell_pb2_grpc.OpenShellServicer", self), self._server
        )
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        await self._server.start()

    async def stop(self) -> None:
        """Cut everything at once."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    def authorization_of(self, method: str) -> list[str]:
        """The authorization headers of one method's calls, in order."""
        return [header for name, header in self.authorizations if name == method]

    def of(self, method: str) -> list[Message]:
        """The requests of one method, in order."""
        return [request for name, request in self.calls if name == method]

    def reports(self) -> list[openshell_pb2.ReportSandboxConfigurationRequest]:
        """The admission reports, in order."""
        return [
            request
            for request in self.of("ReportSandboxConfiguration")
            if isinstance(request, openshell_pb2.ReportSandboxConfigurationRequest)
        ]

    async def called(self, method: str, times: int = 1) -> Message:
        """Wait until a method was called a number of times; returns the last request of it."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.of(method)) >= times)
        return self.of(method)[-1]

    async def _take(self, method: str, request: Message, context: Context) -> None:
        metadata = dict(context.invocation_metadata() or ())
        self.authorizations.append((method, str(metadata.get("authorization", ""))))
        async with self._changed:
            self.calls.append((method, request))
            self._changed.notify_all()
        if self.failures[method]:
            status, detail = self.failures[method].pop(0)
            await context.abort(status, detail)

    async def GetSandboxConfig(
        self, request: sandbox_pb2.GetSandboxConfigRequest, context: Context
    ) -> sandbox_pb2.GetSandboxConfigResponse:
        await self._take("GetSandboxConfig", request, context)
        return self.configurations.pop(0) if len(self.configurations) > 1 else self.configurations[0]

    async def ReportSandboxConfiguration(
        self, request: openshell_pb2.ReportSandboxConfigurationRequest, context: Context
    ) -> openshell_pb2.ReportSandboxConfigurationResponse:
        await self._take("ReportSandboxConfiguration", request, context)
        return openshell_pb2.ReportSandboxConfigurationResponse()

    async def ReportPolicyStatus(
        self, request: openshell_pb2.ReportPolicyStatusRequest, context: Context
    ) -> openshell_pb2.ReportPolicyStatusResponse:
        await self._take("ReportPolicyStatus", request, context)
        return openshell_pb2.ReportPolicyStatusResponse()

    async def UpdateConfig(
        self, request: openshell_pb2.UpdateConfigRequest, context: Context
    ) -> openshell_pb2.UpdateConfigResponse:
        await self._take("UpdateConfig", request, context)
        answer = a_configuration()
        answer.policy.CopyFrom(request.policy)
        answer.version = 4
        self.configurations = [answer]
        return openshell_pb2.UpdateConfigResponse(version=4, policy_hash="abc")

    async def GetSandboxProviderEnvironment(
        self, request: openshell_pb2.GetSandboxProviderEnvironmentRequest, context: Context
    ) -> openshell_pb2.GetSandboxProviderEnvironmentResponse:
        await self._take("GetSandboxProviderEnvironment", request, context)
        return self.environment

    async def ReportMainProcessExit(
        self, request: openshell_pb2.ReportMainProcessExitRequest, context: Context
    ) -> openshell_pb2.ReportMainProcessExitResponse:
        await self._take("ReportMainProcessExit", request, context)
        return openshell_pb2.ReportMainProcessExitResponse()

    async def FinalizeMainProcessExit(
        self, request: openshell_pb2.FinalizeMainProcessExitRequest, context: Context
    ) -> openshell_pb2.FinalizeMainProcessExitResponse:
        await self._take("FinalizeMainProcessExit", request, context)
        return openshell_pb2.FinalizeMainProcessExitResponse()

    async def RefreshSandboxToken(
        self, request: openshell_pb2.RefreshSandboxTokenRequest, context: Context
    ) -> openshell_pb2.RefreshSandboxTokenResponse:
        await self._take("RefreshSandboxToken", request, context)
        if not self.refreshed:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "not built")
            raise AssertionError
        return self.refreshed.pop(0)

    async def PushSandboxLogs(
        self, request_iterator: AsyncIterator[openshell_pb2.PushSandboxLogsRequest], context: Context
    ) -> openshell_pb2.PushSandboxLogsResponse:
        async for request in request_iterator:
            await self._take("PushSandboxLogs", request, context)
        return openshell_pb2.PushSandboxLogsResponse()

    async def ConnectSupervisor(
        self,
        request_iterator: AsyncIterator[openshell_pb2.SupervisorMessage],
        context: Context,
    ) -> AsyncIterator[openshell_pb2.GatewayMessage]:
        first = await anext(aiter(request_iterator))
        await self._take("ConnectSupervisor", first, context)
        session = FakeSession(hello=first.hello)
        if self.rejection is not None:
            yield openshell_pb2.GatewayMessage(session_rejected=openshell_pb2.SessionRejected(reason=self.rejection))
            return
        if self.answers_hello:
            interval = Duration()
            interval.FromNanoseconds(int(self.heartbeat_seconds * 1e9))
            yield openshell_pb2.GatewayMessage(
                session_accepted=openshell_pb2.SessionAccepted(session_id="s-1", heartbeat_interval=interval)
            )
        self.sessions.put_nowait(session)
        listening = asyncio.create_task(self._listen(request_iterator, session))
        try:
            while True:
                what = await session.to_send.get()
                if isinstance(what, grpc.StatusCode):
                    if what is not grpc.StatusCode.OK:
                        await context.abort(what, "ended by the test")
                    return
                yield what
        finally:
            listening.cancel()
            session.over.set()

    async def _listen(self, messages: AsyncIterator[openshell_pb2.SupervisorMessage], session: FakeSession) -> None:
        async for message in messages:
            session.heard.put_nowait(message)
