"""The gateway's side of `openshell.compute.v1`: one plaintext channel over a Unix socket, errors typed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import grpc

from gateway_embedded import handshake
from gateway_embedded.config import DriverPolicy
from gateway_embedded.driver_socket import SocketFault, connection_fault, protocol_fault
from gateway_embedded.errors import (
    DriverCallError,
    DriverUnreachableError,
    HandshakeError,
    PreconditionError,
    UnavailableError,
    public_text,
)
from gateway_embedded.handshake import DriverIdentity, Peer
from gateway_embedded.version import own_version
from openshell.status import StatusCode
from openshell.wire.compute.v1 import compute_driver_pb2, compute_driver_pb2_grpc
from openshell.wire.extension.v1 import extension_pb2

_T = TypeVar("_T")

_DIAL_RETRY_MILLISECONDS = 250
_LOOK_INTERVAL_SECONDS = 1.0
_MAX_MESSAGE_BYTES = 4 * 1024 * 1024

_CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", _DIAL_RETRY_MILLISECONDS),
    ("grpc.min_reconnect_backoff_ms", _DIAL_RETRY_MILLISECONDS),
    ("grpc.max_reconnect_backoff_ms", _DIAL_RETRY_MILLISECONDS),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),
)


class DriverLink:
    """A compute driver behind a socket. `connect` comes first; every other method needs its handshake."""

    def __init__(self, socket: Path, *, policy: DriverPolicy) -> None:
        self._socket = socket
        self._policy = policy
        self._channel = grpc.aio.insecure_channel(f"unix:{socket}", options=_CHANNEL_OPTIONS)
        self._stub: compute_driver_pb2_grpc.ComputeDriverAsyncStub = compute_driver_pb2_grpc.ComputeDriverStub(
            self._channel
        )
        self._identity: DriverIdentity | None = None
        self._waiting_for: SocketFault | None = None

    @property
    def identity(self) -> DriverIdentity:
        """The driver that passed the handshake.

        Raises:
            UnavailableError: None has, yet.
        """
        if self._identity is None:
            why = self._waiting_for or "try again in a moment"
            raise UnavailableError(f"the compute driver on {self._socket} has not answered yet: {why}")
        return self._identity

    @property
    def connected(self) -> bool:
        """Whether a driver passed the handshake."""
        return self._identity is not None

    @property
    def reachable(self) -> bool:
        """Whether a driver passed the handshake and its socket answers now."""
        lost = (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.CONNECTING)
        return self.connected and self._channel.get_state() not in lost

    async def connect(
        self, *, window_seconds: float, on_wait: Callable[[SocketFault], None] = lambda _: None
    ) -> DriverIdentity:
        """Dial, retrying every 250 ms, and shake hands.

        Args:
            window_seconds: How long a driver may take to answer.
            on_wait: Is told why there is none yet, once for every cause.

        Raises:
            HandshakeError: The driver does not fit this gateway, or is none.
            DriverUnreachableError: Nobody answered within the window, or nobody can for a reason that lasts.
            DriverCallError: The driver refused.
        """
        call = asyncio.create_task(
            self._call(
                "GetCapabilities",
                self._stub.GetCapabilities(self._hello(), timeout=window_seconds, wait_for_ready=True),
            )
        )
        look = asyncio.create_task(self._lasting_fault(on_wait))
        try:
            await asyncio.wait((call, look), return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise self._unreachable("GetCapabilities", look.result())
            self._identity = self._check(call.result())
        except DriverCallError as error:
            if error.status is StatusCode.UNIMPLEMENTED:
                raise HandshakeError(
                    "what answers there is not a compute driver; --compute-driver-socket takes the "
                    "driver's own socket (--bind-socket of openshell-driver-docker)"
                ) from error
            if error.status is StatusCode.DEADLINE_EXCEEDED:
                fault = connection_fault(self._socket) or await protocol_fault(self._socket)
                raise self._unreachable("GetCapabilities", fault, waited_seconds=window_seconds) from error
            raise
        finally:
            for task in (call, look):
                task.cancel()
            await asyncio.gather(call, look, return_exceptions=True)
        return self._identity

    async def validate(self, sandbox: compute_driver_pb2.DriverSandbox) -> None:
        """Ask whether the driver could create this sandbox; `confirm` comes first."""
        request = compute_driver_pb2.ValidateSandboxCreateRequest(sandbox=sandbox)
        await self._call("ValidateSandboxCreate", self._stub.ValidateSandboxCreate(request))

    async def create(self, sandbox: compute_driver_pb2.DriverSandbox) -> None:
        """Have a sandbox created; `confirm` comes first, and what follows is told by the watch."""
        await self._call(
            "CreateSandbox", self._stub.CreateSandbox(compute_driver_pb2.CreateSandboxRequest(sandbox=sandbox))
        )

    async def stop(self, sandbox_id: str, name: str, *, timeout_seconds: float | None = None) -> None:
        """Stop a sandbox's compute and keep what is needed to start it again."""
        request = compute_driver_pb2.StopSandboxRequest(sandbox_id=sandbox_id, name=name)
        await self._call("StopSandbox", self._stub.StopSandbox(request, timeout=timeout_seconds))

    async def delete(self, sandbox_id: str, name: str) -> bool:
        """Remove a sandbox; false when there was nothing left of it."""
        request = compute_driver_pb2.DeleteSandboxRequest(sandbox_id=sandbox_id, name=name)
        answer = await self._call("DeleteSandbox", self._stub.DeleteSandbox(request))
        return answer.deleted

    async def get(
        self, sandbox_id: str, name: str, *, timeout_seconds: float | None = None
    ) -> compute_driver_pb2.DriverSandbox:
        """The driver's view of one sandbox; NOT_FOUND means that it is certainly absent."""
        request = compute_driver_pb2.GetSandboxRequest(sandbox_id=sandbox_id, name=name)
        answer = await self._call("GetSandbox", self._stub.GetSandbox(request, timeout=timeout_seconds))
        if answer.sandbox.id != sandbox_id:
            raise DriverCallError(
                f"the compute driver answered for another sandbox than {sandbox_id}",
                rpc="GetSandbox",
                status=StatusCode.INTERNAL,
            )
        return answer.sandbox

    async def list(self) -> list[compute_driver_pb2.DriverSandbox]:
        """Every sandbox the driver knows."""
        answer = await self._call("ListSandboxes", self._stub.ListSandboxes(compute_driver_pb2.ListSandboxesRequest()))
        return [*answer.sandboxes]

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[AsyncIterator[compute_driver_pb2.WatchSandboxesEvent]]:
        """The driver's stream: a replay of everything, then live; leaving the context cancels it."""
        call = self._stub.WatchSandboxes(compute_driver_pb2.WatchSandboxesRequest())

        async def events() -> AsyncIterator[compute_driver_pb2.WatchSandboxesEvent]:
            try:
                async for event in call:
                    yield event
            except grpc.aio.AioRpcError as error:
                raise self._failure("WatchSandboxes", error) from error

        try:
            yield events()
        finally:
            call.cancel()

    async def close(self) -> None:
        """Let go of the socket."""
        await self._channel.close()

    async def confirm(self, rpc: str) -> DriverIdentity:
        """Read the capabilities again, as before every validate, create and start (compute-driver contract 3.2).

        Args:
            rpc: What is to be called next, for the error's text.

        Raises:
            PreconditionError: The acknowledged policy is not byte for byte what it was at the start.
            HandshakeError: Another driver has taken the socket over that does not fit.
        """
        known = self.identity.admission_policy
        answer = await self._call("GetCapabilities", self._stub.GetCapabilities(self._hello()))
        if answer.resource_admission_policy != known:
            raise PreconditionError(
                f"{rpc} refused: the compute driver changed its resource admission policy since this gateway started; "
                "restart the gateway",
                reason="DRIVER_POLICY_CHANGED",
            )
        self._identity = self._check(answer)
        return self._identity

    def _check(self, answer: compute_driver_pb2.GetCapabilitiesResponse) -> DriverIdentity:
        extension = answer.extension
        peer = None
        if answer.HasField("extension"):
            peer = Peer(
                major=extension.protocol_version.major,
                minor=extension.protocol_version.minor,
                name=extension.implementation_name,
                version=extension.implementation_version,
                supported=tuple(extension.supported_capabilities),
                required=tuple(extension.required_capabilities),
            )
        peer = handshake.check_peer(peer)
        handshake.check_acknowledgement(answer.resource_admission_policy, self._policy)
        if answer.supports_sandbox_authentication:
            raise HandshakeError(
                "the compute driver authenticates its sandboxes itself, which this gateway does not offer"
            )
        return DriverIdentity(
            driver_name=answer.driver_name,
            driver_version=answer.driver_version,
            default_image=answer.default_image,
            manages_lifecycle=answer.gateway_manages_lifecycle,
            reports_runtime_readiness=answer.driver_reports_runtime_readiness,
            peer=peer,
            admission_policy=answer.resource_admission_policy,
            capabilities=answer.resource_capabilities.SerializeToString(),
        )

    @staticmethod
    def _hello() -> compute_driver_pb2.GetCapabilitiesRequest:
        return compute_driver_pb2.GetCapabilitiesRequest(
            gateway=extension_pb2.PeerMetadata(
                protocol_version=extension_pb2.ProtocolVersion(
                    major=handshake.PROTOCOL_MAJOR, minor=handshake.PROTOCOL_MINOR
                ),
                implementation_name=handshake.IMPLEMENTATION_NAME,
                implementation_version=own_version(),
                supported_capabilities=handshake.SUPPORTED_CAPABILITIES,
                required_capabilities=[handshake.CONTRACT_CAPABILITY],
            )
        )

    async def _call(self, rpc: str, call: Awaitable[_T]) -> _T:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise self._failure(rpc, error) from error

    def _failure(self, rpc: str, error: grpc.aio.AioRpcError) -> DriverCallError:
        """The typed error: the driver's own words, unless it was the socket that failed."""
        status = StatusCode.from_grpc(error.code())
        if status is StatusCode.UNAVAILABLE:
            fault = connection_fault(self._socket)
            if fault is not None or self._channel.get_state() is not grpc.ChannelConnectivity.READY:
                return self._unreachable(rpc, fault)
        details = error.details() or "the compute driver gave no reason"
        return DriverCallError(public_text(details), rpc=rpc, status=status)

    def _unreachable(
        self, rpc: str, fault: SocketFault | None, *, waited_seconds: float | None = None
    ) -> DriverUnreachableError:
        within = "" if waited_seconds is None else f" within {waited_seconds:g} s"
        why = fault or "its connection broke or it does not answer; see the driver's log and try again"
        return DriverUnreachableError(
            f"the compute driver cannot be reached on its socket {self._socket}{within}: {why}", rpc=rpc
        )

    async def _lasting_fault(self, on_wait: Callable[[SocketFault], None]) -> SocketFault:
        """Look regularly what is wrong with the socket, until the same is found twice that waiting does not cure."""
        before: SocketFault | None = None
        try:
            while True:
                fault = connection_fault(self._socket) or await protocol_fault(self._socket)
                if fault is not None and fault == before and fault.lasting:
                    return fault
                changed, before, self._waiting_for = fault != before, fault, fault
                if fault is not None and changed:
                    on_wait(fault)
                await asyncio.sleep(_LOOK_INTERVAL_SECONDS)
        finally:
            self._waiting_for = None
