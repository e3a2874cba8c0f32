"""The gateway over gRPC: bearer token, bounded repetition, typed errors (isolation contract 1 and 4.1)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, TypeVar

import grpc
from google.protobuf.timestamp_pb2 import Timestamp

from openshell.isolation.errors import cause_of
from openshell.status import StatusCode
from openshell.verdicts import clean_text
from openshell.wire.datamodel.v1.datamodel_pb2 import WorkspaceSelector
from openshell.wire.sandbox.v1 import sandbox_pb2
from openshell.wire.v1 import openshell_pb2, openshell_pb2_grpc
from supervisor_reference.backoff import pause_after
from supervisor_reference.endpoint import unreachable_because
from supervisor_reference.errors import GatewayError, LaunchInputError
from supervisor_reference.gateway import (
    AdmissionState,
    ConfigurationSnapshot,
    Generation,
    ProviderEnvironment,
    RenewedTokens,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from google.protobuf.message import Message

    from openshell.wire.sandbox.v1.sandbox_pb2 import SandboxPolicy
    from openshell.wire.v1.openshell_pb2 import GatewayMessage, SupervisorMessage
    from supervisor_reference.endpoint import GatewayEndpoint
    from supervisor_reference.gateway import AdmissionReport, SupervisorStream
    from supervisor_reference.timing import Timing

_log = logging.getLogger(__name__)

_Request = TypeVar("_Request", bound="Message")
_Response = TypeVar("_Response", bound="Message")

_MAX_DETAIL_BYTES: Final = 512
_UNANSWERED: Final = frozenset({StatusCode.UNAVAILABLE})
_WIRE_STATES: Final = {
    AdmissionState.PENDING: openshell_pb2.CONFIGURATION_ADMISSION_STATE_PENDING,
    AdmissionState.ACCEPTED: openshell_pb2.CONFIGURATION_ADMISSION_STATE_ACCEPTED,
    AdmissionState.REJECTED: openshell_pb2.CONFIGURATION_ADMISSION_STATE_REJECTED,
}


class GrpcGateway:
    """A `Gateway` at an endpoint, for one sandbox and one supervisor instance.

    Args:
        endpoint: Where the gateway is.
        sandbox_id: The sandbox that the token is for.
        sandbox_name: Its name, which some requests carry beside the token.
        instance_id: UUID of this supervisor start.
        token: The gateway token.
        timing: Limits.

    Raises:
        LaunchInputError: A TLS file cannot be read.
    """

    def __init__(
        self,
        endpoint: GatewayEndpoint,
        *,
        sandbox_id: str,
        sandbox_name: str,
        instance_id: str,
        token: str,
        timing: Timing,
    ) -> None:
        self._endpoint = endpoint
        self._sandbox_id = sandbox_id
        self._sandbox_name = sandbox_name
        self._instance_id = instance_id
        self._token = token
        self._timing = timing
        self._channel = _open_channel(endpoint)
        self._stub = openshell_pb2_grpc.OpenShellStub(self._channel)

    @property
    def address(self) -> str:
        """The gateway's endpoint as configured."""
        return self._endpoint.url

    async def connect(self) -> None:
        """Wait until somebody listens at the endpoint (see `Gateway.connect`)."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timing.gateway_connect_seconds
        attempt = 0
        while True:
            attempt += 1
            left = deadline - loop.time()
            cause = await unreachable_because(self._endpoint, limit_seconds=max(left, 0.1))
            if cause is None:
                return
            pause = self._pause(attempt)
            if loop.time() + pause >= deadline:
                raise GatewayError(
                    f"cannot reach the gateway at {self.address}: {cause}",
                    operation="connect",
                    detail=cause,
                    status=StatusCode.UNAVAILABLE,
                )
            if attempt == 1:
                _log.warning("the gateway at %s does not answer yet: %s", self.address, cause)
            await asyncio.sleep(pause)

    async def fetch_configuration(self) -> ConfigurationSnapshot:
        """See `Gateway.fetch_configuration`."""
        request = sandbox_pb2.GetSandboxConfigRequest(name=self._sandbox_name)
        answer = await self._call("GetSandboxConfig", self._stub.GetSandboxConfig, request)
        return ConfigurationSnapshot(
            generation=Generation(
                policy_version=answer.version,
                policy_hash=answer.policy_hash,
                config_revision=answer.config_revision,
                provider_env_revision=answer.provider_env_revision,
            ),
            policy=answer.policy if answer.HasField("policy") else None,
            from_global_policy=answer.policy_source == sandbox_pb2.POLICY_SOURCE_GLOBAL,
            admitted=answer.configuration_admitted,
            instance_id=answer.configuration_instance_id,
            error=answer.configuration_error,
            workspace=answer.workspace,
        )

    async def report_configuration(self, report: AdmissionReport) -> None:
        """See `Gateway.report_configuration`."""
        await self._call("ReportSandboxConfiguration", self._stub.ReportSandboxConfiguration, self._report(report))

    async def report_refusal(self, report: AdmissionReport) -> None:
        """See `Gateway.report_refusal`."""
        await self._once(
            "ReportSandboxConfiguration",
            self._stub.ReportSandboxConfiguration,
            self._report(report),
            limit_seconds=self._timing.refusal_report_seconds,
        )

    async def report_policy_loaded(self, version: int) -> None:
        """See `Gateway.report_policy_loaded`."""
        request = openshell_pb2.ReportPolicyStatusRequest(
            sandbox_id=self._sandbox_id, version=version, status=openshell_pb2.POLICY_STATUS_LOADED
        )
        await self._call("ReportPolicyStatus", self._stub.ReportPolicyStatus, request)

    async def report_policy_failed(self, version: int, load_error: str) -> None:
        """See `Gateway.report_policy_failed`."""
        request = openshell_pb2.ReportPolicyStatusRequest(
            sandbox_id=self._sandbox_id,
            version=version,
            status=openshell_pb2.POLICY_STATUS_FAILED,
            load_error=load_error,
        )
        await self._once(
            "ReportPolicyStatus",
            self._stub.ReportPolicyStatus,
            request,
            limit_seconds=self._timing.refusal_report_seconds,
        )

    async def write_policy(self, policy: SandboxPolicy, *, workspace: str) -> int:
        """See `Gateway.write_policy`."""
        request = openshell_pb2.UpdateConfigRequest(
            sandbox=self._sandbox_name, policy=policy, request_id=str(uuid.uuid4())
        )
        if workspace:
            request.workspace_scope.CopyFrom(WorkspaceSelector(workspace=workspace))
        answer = await self._call("UpdateConfig", self._stub.UpdateConfig, request)
        return answer.version

    async def fetch_provider_environment(self) -> ProviderEnvironment:
        """See `Gateway.fetch_provider_environment`."""
        request = openshell_pb2.GetSandboxProviderEnvironmentRequest(sandbox_id=self._sandbox_id)
        answer = await self._call("GetSandboxProviderEnvironment", self._stub.GetSandboxProviderEnvironment, request)
        return ProviderEnvironment(
            revision=answer.provider_env_revision, environment=dict(answer.environment), files=dict(answer.files)
        )

    async def report_main_process_exit(self, exit_code: int) -> None:
        """See `Gateway.report_main_process_exit`."""
        request = openshell_pb2.ReportMainProcessExitRequest(
            sandbox_id=self._sandbox_id, instance_id=self._instance_id, exit_code=exit_code
        )
        await self._call("ReportMainProcessExit", self._stub.ReportMainProcessExit, request)

    async def finalize_main_process_exit(self) -> None:
        """See `Gateway.finalize_main_process_exit`."""
        request = openshell_pb2.FinalizeMainProcessExitRequest(
            sandbox_id=self._sandbox_id, instance_id=self._instance_id
        )
        await self._call("FinalizeMainProcessExit", self._stub.FinalizeMainProcessExit, request)

    async def refresh_tokens(self) -> RenewedTokens:
        """See `Gateway.refresh_tokens`."""
        operation = "RefreshSandboxToken"
        answer = await self._call(operation, self._stub.RefreshSandboxToken, openshell_pb2.RefreshSandboxTokenRequest())
        renewed = RenewedTokens(
            gateway_token=answer.token,
            gateway_expires_at=_moment(answer.expiration_time, operation)
            if answer.HasField("expiration_time")
            else None,
            sandbox_token=answer.sandbox_token,
            sandbox_expires_at=(
                _moment(answer.sandbox_expiration_time, operation)
                if answer.HasField("sandbox_expiration_time")
                else None
            ),
            session_id=answer.session_id,
            credential_epoch=answer.credential_epoch,
        )
        if answer.token:
            self._token = answer.token
        return renewed

    async def push_error_line(self, text: str) -> None:
        """See `Gateway.push_error_line`."""
        moment = Timestamp()
        moment.FromDatetime(datetime.now(UTC))
        line = openshell_pb2.SandboxLogLine(
            sandbox_id=self._sandbox_id,
            event_time=moment,
            level="ERROR",
            target="openshell_supervisor",
            message=text,
            source="supervisor",
        )
        request = openshell_pb2.PushSandboxLogsRequest(sandbox_id=self._sandbox_id, logs=[line])
        call = self._stub.PushSandboxLogs(
            iter([request]), metadata=self._metadata(), timeout=self._timing.refusal_report_seconds
        )
        with self._typed_errors("PushSandboxLogs"):
            await call

    def connect_supervisor(self) -> SupervisorStream:
        """See `Gateway.connect_supervisor`."""
        call = self._stub.ConnectSupervisor(metadata=self._metadata())
        return _GrpcStream(call, self._typed_errors)

    async def close(self) -> None:
        """Close the channel; calls that are under way end."""
        await self._channel.close(None)

    def _report(self, report: AdmissionReport) -> openshell_pb2.ReportSandboxConfigurationRequest:
        return openshell_pb2.ReportSandboxConfigurationRequest(
            sandbox_id=self._sandbox_id,
            admission=openshell_pb2.SandboxConfigurationAdmission(
                instance_id=self._instance_id,
                state=_WIRE_STATES[report.state],
                policy_version=report.generation.policy_version,
                policy_hash=report.generation.policy_hash,
                config_revision=report.generation.config_revision,
                provider_env_revision=report.generation.provider_env_revision,
                error=report.error,
            ),
            expected_instance_id=report.expected_instance_id,
            refused_before_start=report.refused_before_start,
        )

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self._token}"),)

    def _pause(self, attempt: int) -> float:
        return pause_after(attempt, self._timing.first_backoff_seconds, self._timing.last_backoff_seconds)

    async def _call(
        self, operation: str, method: grpc.aio.UnaryUnaryMultiCallable[_Request, _Response], request: _Request
    ) -> _Response:
        """Call, and repeat for a bounded time while nobody answers: a gateway may restart at any moment."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timing.gateway_connect_seconds
        attempt = 0
        while True:
            attempt += 1
            try:
                return await self._once(operation, method, request, limit_seconds=self._timing.gateway_call_seconds)
            except GatewayError as error:
                pause = self._pause(attempt)
                if error.status not in _UNANSWERED or loop.time() + pause >= deadline:
                    raise await self._explained(error) from error
                _log.info("%s is repeated: %s", operation, error.reason)
                await asyncio.sleep(pause)

    async def _once(
        self,
        operation: str,
        method: grpc.aio.UnaryUnaryMultiCallable[_Request, _Response],
        request: _Request,
        *,
        limit_seconds: float,
    ) -> _Response:
        with self._typed_errors(operation):
            return await method(request, metadata=self._metadata(), timeout=limit_seconds)

    async def _explained(self, error: GatewayError) -> GatewayError:
        """Replace gRPC's list of attempts by the one cause that an operator can act on, where there is one."""
        if error.status not in _UNANSWERED:
            return error
        cause = await unreachable_because(self._endpoint, limit_seconds=1.0)
        if cause is None:
            return error
        return GatewayError(
            f"cannot reach the gateway at {self.address}: {cause}",
            operation=error.operation,
            detail=cause,
            status=error.status,
        )

    @contextlib.contextmanager
    def _typed_errors(self, operation: str) -> Iterator[None]:
        try:
            yield
        except grpc.aio.AioRpcError as error:
            status = StatusCode.from_grpc(error.code())
            detail = clean_text(error.details() or "", max_bytes=_MAX_DETAIL_BYTES)
            raise GatewayError(
                f"the gateway at {self.address} answered {operation} with {status.name}: {detail or 'no detail'}",
                operation=operation,
                detail=detail,
                status=status,
            ) from None


class _GrpcStream:
    def __init__(
        self,
        call: grpc.aio.StreamStreamCall[SupervisorMessage, GatewayMessage],
        typed_errors: Callable[[str], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._call = call
        self._typed_errors = typed_errors

    async def send(self, message: SupervisorMessage) -> None:
        with self._typed_errors("ConnectSupervisor"):
            try:
                await self._call.write(message)
            except asyncio.InvalidStateError as error:
                # grpc's way to say that the call has ended; the status is told by the reader.
                raise GatewayError(
                    "the session stream has ended",
                    operation="ConnectSupervisor",
                    detail="",
                    status=StatusCode.CANCELLED,
                ) from error

    async def receive(self) -> GatewayMessage | None:
        with self._typed_errors("ConnectSupervisor"):
            answer = await self._call.read()
        return answer if isinstance(answer, openshell_pb2.GatewayMessage) else None

    def cancel(self) -> None:
        self._call.cancel()


def _moment(stamp: Timestamp, operation: str) -> datetime:
    try:
        return stamp.ToDatetime(tzinfo=UTC)
    except (ValueError, OverflowError):
        text = f"the gateway answered {operation} with a time that does not exist"
        raise GatewayError(text, operation=operation, detail="", status=StatusCode.INTERNAL) from None


def _open_channel(endpoint: GatewayEndpoint) -> grpc.aio.Channel:
    options: list[tuple[str, int | str]] = [
        # The way to the gateway is the operator's endpoint and nothing else: no proxy from the environment.
        ("grpc.enable_http_proxy", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2000),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
    ]
    if not endpoint.tls:
        return grpc.aio.insecure_channel(endpoint.target, options=options)
    if endpoint.server_name is not None:
        options.append(("grpc.ssl_target_name_override", endpoint.server_name))
    credentials = grpc.ssl_channel_credentials(
        root_certificates=_pem("OPENSHELL_TLS_CA", endpoint.ca_file),
        private_key=_pem("OPENSHELL_TLS_KEY", endpoint.key_file),
        certificate_chain=_pem("OPENSHELL_TLS_CERT", endpoint.certificate_file),
    )
    return grpc.aio.secure_channel(endpoint.target, credentials, options=options)


def _pem(name: str, path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        cause = cause_of(error).lower()
        raise LaunchInputError(f"{name} {path} cannot be read: {cause}") from error
