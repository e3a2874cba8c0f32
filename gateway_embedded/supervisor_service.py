"""The RPCs that supervisors call; two of them, the dual ones, serve users too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, suppress

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from gateway_embedded import encoding, requests
from gateway_embedded.admission import Report, is_uuid
from gateway_embedded.auth import SandboxPrincipal
from gateway_embedded.background import BackgroundTasks
from gateway_embedded.config import GatewayConfig
from gateway_embedded.dispatch import Call, Handler
from gateway_embedded.errors import (
    ConflictError,
    InvalidRequestError,
    NotBuiltError,
    PermissionDeniedError,
    UnavailableError,
)
from gateway_embedded.replays import REPLAYED_METADATA, ReplayGuard
from gateway_embedded.request_ledger import RequestKey
from gateway_embedded.sandboxes import SandboxRecord
from gateway_embedded.sessions import MISSED_HEARTBEATS, Session, SessionEnd
from gateway_embedded.states import SandboxStates
from gateway_embedded.supervision import Supervision
from gateway_embedded.tokens import TokenAuthority
from openshell.wire.datamodel.v1.datamodel_pb2 import WorkspaceSelector
from openshell.wire.sandbox.v1 import sandbox_pb2
from openshell.wire.v1 import openshell_pb2


class SupervisorService:
    """Handlers of what a control supervisor calls."""

    def __init__(
        self,
        *,
        states: SandboxStates,
        supervision: Supervision,
        replays: ReplayGuard,
        authority: TokenAuthority,
        tasks: BackgroundTasks,
        config: GatewayConfig,
    ) -> None:
        self._states = states
        self._supervision = supervision
        self._replays = replays
        self._authority = authority
        self._tasks = tasks
        self._config = config

    def handlers(self) -> Mapping[str, Handler]:
        """The handler of every built RPC of supervisors, by name."""
        return {
            "GetSandboxConfig": self.get_sandbox_config,
            "UpdateConfig": self.update_config,
            "GetSandboxProviderEnvironment": self.get_sandbox_provider_environment,
            "ReportSandboxConfiguration": self.report_sandbox_configuration,
            "ReportPolicyStatus": self.report_policy_status,
            "ReportMainProcessExit": self.report_main_process_exit,
            "FinalizeMainProcessExit": self.finalize_main_process_exit,
            "RefreshSandboxToken": self.refresh_sandbox_token,
            "ConnectSupervisor": self.connect_supervisor,
        }

    async def get_sandbox_config(self, request: sandbox_pb2.GetSandboxConfigRequest, call: Call) -> Message:
        """The effective configuration: a supervisor's own sandbox, or the one a user names."""
        scope = request.workspace_scope if request.HasField("workspace_scope") else None
        if isinstance(call.principal, SandboxPrincipal):
            record = await self._supervision.record_of(call.principal)
            _require_own(record, request.name, scope)
        else:
            record = await self._states.find(requests.workspace_of(scope), requests.sandbox_name(request.name))
        return await self._supervision.configuration(record)

    async def update_config(self, request: openshell_pb2.UpdateConfigRequest, call: Call) -> Message:
        """A supervisor's write-back of the policy it starts with; changes by users are not built."""
        if not isinstance(call.principal, SandboxPrincipal):
            raise NotBuiltError("UpdateConfig by users is not built in the embedded gateway of this release")
        record = await self._supervision.record_of(call.principal)
        _require_own(record, request.sandbox, request.workspace_scope if request.HasField("workspace_scope") else None)
        requests.check_write_back(request)

        async def work() -> bytes:
            if request.expected_resource_version not in (0, record.resource_version):
                raise ConflictError(
                    f"sandbox {record.name!r} changed meanwhile; read it again and repeat",
                    facts={"recovery": "REFRESH_STATE", "current_resource_version": str(record.resource_version)},
                )
            return (await self._supervision.write_back_policy(record, request)).SerializeToString()

        key = RequestKey(
            caller=record.id,
            request_id=requests.request_id(request.request_id),
            method="UpdateConfig",
            workspace=record.workspace,
        )
        # The same policy stored twice is one revision, so a supervisor need not be told that an outcome is uncertain.
        reply = await self._replays.run(key, requests.payload_of(request), work, repeatable=True)
        if reply.replayed:
            call.reply_metadata.append(REPLAYED_METADATA)
        return openshell_pb2.UpdateConfigResponse.FromString(reply.body)

    async def get_sandbox_provider_environment(
        self, request: openshell_pb2.GetSandboxProviderEnvironmentRequest, call: Call
    ) -> Message:
        """The (empty) environment of providers."""
        return await self._supervision.provider_environment(await self._own(request.sandbox_id, call))

    async def report_sandbox_configuration(
        self, request: openshell_pb2.ReportSandboxConfigurationRequest, call: Call
    ) -> Message:
        """A supervisor's word on its configuration."""
        call.sandbox.require(request.sandbox_id)
        report = Report(
            admission=encoding.from_admission(request.admission) if request.HasField("admission") else None,
            expected_instance_id=request.expected_instance_id,
            refused_before_start=request.refused_before_start,
        )
        await self._supervision.report_configuration(call.sandbox, report)
        return openshell_pb2.ReportSandboxConfigurationResponse()

    async def report_policy_status(self, request: openshell_pb2.ReportPolicyStatusRequest, call: Call) -> Message:
        """Whether a policy revision could be loaded."""
        if not request.sandbox_id:
            raise InvalidRequestError("sandbox_id is required", field="sandbox_id")
        await self._supervision.report_policy_status(await self._own(request.sandbox_id, call), request)
        return openshell_pb2.ReportPolicyStatusResponse()

    async def report_main_process_exit(
        self, request: openshell_pb2.ReportMainProcessExitRequest, call: Call
    ) -> Message:
        """The main process ended."""
        await self._supervision.report_main_process_exit(await self._own(request.sandbox_id, call), request)
        return openshell_pb2.ReportMainProcessExitResponse()

    async def finalize_main_process_exit(
        self, request: openshell_pb2.FinalizeMainProcessExitRequest, call: Call
    ) -> Message:
        """Everything the main process wrote was delivered."""
        await self._supervision.finalize_main_process_exit(await self._own(request.sandbox_id, call), request)
        return openshell_pb2.FinalizeMainProcessExitResponse()

    async def refresh_sandbox_token(self, request: openshell_pb2.RefreshSandboxTokenRequest, call: Call) -> Message:
        """Fresh tokens of the same launch."""
        if request.extension_service_names:
            raise NotBuiltError("credentials of extension services are not built in the embedded gateway")
        record = await self._supervision.record_of(call.sandbox)
        tokens = self._authority.mint(record.id, record.launch, now=self._states.clock())
        answer = openshell_pb2.RefreshSandboxTokenResponse(
            token=tokens.gateway_token,
            sandbox_token=tokens.sandbox_token,
            sandbox_expiration_time=encoding.to_timestamp(tokens.sandbox_expires_at),
            session_id=record.launch.session_id,
            credential_epoch=record.launch.auth_epoch,
        )
        if tokens.gateway_expires_at is not None:
            answer.expiration_time.CopyFrom(encoding.to_timestamp(tokens.gateway_expires_at))
        return answer

    async def connect_supervisor(
        self, messages: AsyncIterator[openshell_pb2.SupervisorMessage], call: Call
    ) -> AsyncGenerator[openshell_pb2.GatewayMessage, None]:
        """A supervisor's session: Hello, Accepted, then heartbeats both ways until one side ends it."""
        interval = self._config.heartbeat_interval_seconds
        hello = await _first_hello(messages, within_seconds=interval * MISSED_HEARTBEATS)
        call.sandbox.require(hello.sandbox_id)
        if not is_uuid(hello.instance_id):
            raise InvalidRequestError("instance_id must be a UUID", field="hello.instance_id")
        record = await self._supervision.record_of(call.sandbox)
        session = self._states.sessions.open(record.id, hello.instance_id)
        try:
            await self._supervision.session_opened(record.id, hello.instance_id)
            accepted = openshell_pb2.SessionAccepted(
                session_id=session.session_id, heartbeat_interval=_seconds(interval)
            )
            yield openshell_pb2.GatewayMessage(session_accepted=accepted)
            async with aclosing(self._heartbeats(session, messages, interval)) as beats:
                async for message in beats:
                    yield message
        finally:
            if self._states.sessions.close(session):
                # The stream's own task may be on its way out; what follows from the loss must happen all the same.
                self._tasks.spawn(self._supervision.session_closed(record.id), name=f"session lost {record.id}")

    async def _heartbeats(
        self, session: Session, messages: AsyncIterator[openshell_pb2.SupervisorMessage], interval: float
    ) -> AsyncGenerator[openshell_pb2.GatewayMessage, None]:
        loop = asyncio.get_running_loop()
        heard_at = loop.time()

        async def listen() -> None:
            nonlocal heard_at
            async for _ in messages:
                heard_at = loop.time()

        listener = loop.create_task(listen())
        try:
            while True:
                await asyncio.wait((listener, session.ended), timeout=interval, return_when=asyncio.FIRST_COMPLETED)
                if session.ended.done():
                    _raise_for(session.ended.result())
                    return
                if listener.done():
                    listener.result()
                    return
                if loop.time() - heard_at >= interval * MISSED_HEARTBEATS:
                    _raise_for(SessionEnd.SILENT)
                yield openshell_pb2.GatewayMessage(heartbeat=openshell_pb2.GatewayHeartbeat())
        finally:
            listener.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await listener

    async def _own(self, sandbox_id: str, call: Call) -> SandboxRecord:
        call.sandbox.require(sandbox_id)
        return await self._supervision.record_of(call.sandbox)


def _require_own(record: SandboxRecord, name: str, scope: WorkspaceSelector | None) -> None:
    """A supervisor may name its sandbox and workspace, or leave that to its token, but may name no other."""
    if name not in ("", record.name, record.id) or (scope is not None and scope.workspace != record.workspace):
        raise PermissionDeniedError("the gateway token belongs to another sandbox than the request names")


async def _first_hello(
    messages: AsyncIterator[openshell_pb2.SupervisorMessage], *, within_seconds: float
) -> openshell_pb2.SupervisorHello:
    try:
        async with asyncio.timeout(within_seconds):
            first = await anext(messages)
    except StopAsyncIteration as error:
        raise InvalidRequestError("the first message must be a hello; the stream ended without one") from error
    except TimeoutError as error:
        raise InvalidRequestError("the first message must be a hello; none came in time") from error
    if first.WhichOneof("payload") != "hello":
        raise InvalidRequestError("the first message must be a hello", field="hello")
    return first.hello


def _raise_for(end: SessionEnd) -> None:
    """Turn the end of a session into the stream's status; OK where the supervisor is to exit."""
    match end:
        case SessionEnd.STOPPED:
            return
        case SessionEnd.SHUTDOWN:
            raise UnavailableError("the gateway is stopping; connect again when it is back")
        case SessionEnd.SILENT:
            raise UnavailableError(f"no heartbeat came for {MISSED_HEARTBEATS} intervals; connect again")
        case SessionEnd.SUPERSEDED:
            raise ConflictError("another supervisor instance of this sandbox connected", reason="SESSION_SUPERSEDED")


def _seconds(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration
