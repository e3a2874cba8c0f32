"""The gRPC services of a boundary: negotiation, OpenBoundary, tokens, streams (isolation contract 2.3, 2.4, 3.1)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import NoReturn

import grpc
import grpc.aio

from openshell.isolation.boundary_session import AuthenticatedPeer, BoundarySession
from openshell.isolation.documents import BoundaryBootstrap, DocumentError, RuntimeDescriptor
from openshell.isolation.envelope import RequestEnvelope, ResponseEnvelope
from openshell.isolation.errors import (
    BackendError,
    DescriptorError,
    FramingError,
    IsolationError,
    NegotiationError,
    TokenError,
)
from openshell.isolation.framing import MAX_CONTROL_RPC_BYTES, FrameBuffer, chunks, encode_control
from openshell.isolation.negotiation import negotiate
from openshell.isolation.operations import ErrorResult, OpenMediation, Result
from openshell.isolation.terminator import PhysicalConnection
from openshell.isolation.tokens import TokenClaims, TokenVerifier
from openshell.status import StatusCode
from openshell.wire.extension.v1 import extension_pb2
from openshell.wire.isolation.backend.v1 import isolation_backend_pb2 as control_pb2
from openshell.wire.isolation.backend.v1 import isolation_backend_pb2_grpc as control_grpc
from openshell.wire.sandbox.protocol.v1 import sandbox_protocol_pb2 as stream_pb2
from openshell.wire.sandbox.protocol.v1 import sandbox_protocol_pb2_grpc as stream_grpc

logger = logging.getLogger(__name__)

CONTROL_IO_SECONDS = 30.0
"""How long a connection may take to open the boundary, and a stream to send its handle and its request."""
MAX_HANDLE_BYTES = 128

LAUNCH_MISMATCH = "boundary launch identity does not match runtime"
INVALID_DESCRIPTOR = "invalid OpenShell runtime descriptor"
CONTENT_MISMATCH = "driver descriptor does not match provisioned boundary"
ONLY_DATA = "only data frames are allowed after boundary binding"

Chunk = stream_pb2.DelegatedBoundaryChunk
Context = grpc.aio.ServicerContext[object, object]


@dataclass(slots=True, kw_only=True)
class _Peer:
    """What one physical connection has done so far."""

    connection: PhysicalConnection
    negotiated: bool = False
    auth_epoch: int | None = None
    deadline: asyncio.TimerHandle | None = None

    def opened(self, auth_epoch: int) -> None:
        """The boundary was opened on it, by a token of this epoch."""
        self.auth_epoch = auth_epoch
        self.connection.trusted = True
        self.end()

    def end(self) -> None:
        """Nothing is waited for any more."""
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None


async def refuse(context: Context, code: StatusCode, text: str) -> NoReturn:
    """End a call with a status; the text is bounded and never empty."""
    await context.abort(code.grpc, text)
    raise AssertionError("abort returned")


class PeerGate:
    """Knows the physical connections and lets through only calls that arrived on one of them.

    Args:
        lookup: finds the live connection of a gRPC peer string.
        verifier: verifier of sandbox tokens.
    """

    def __init__(self, lookup: Callable[[str], PhysicalConnection | None], verifier: TokenVerifier) -> None:
        self._lookup = lookup
        self._verifier = verifier
        self._peers: dict[str, _Peer] = {}

    def expect(self, connection: PhysicalConnection) -> None:
        """A connection was made; it is cut unless it opens the boundary within 30 seconds."""
        deadline = asyncio.get_running_loop().call_later(CONTROL_IO_SECONDS, connection.close)
        self._peers[connection.id] = _Peer(connection=connection, deadline=deadline)

    async def peer(self, context: Context) -> _Peer:
        """The peer of a call; refused when it did not come through TLS."""
        connection = self._lookup(context.peer())
        if connection is None:
            await refuse(context, StatusCode.PERMISSION_DENIED, "the connection did not pass the TLS terminator")
        return self._peers[connection.id]

    async def claims(self, context: Context) -> TokenClaims:
        """The verified token of a call."""
        headers = [v for k, v in context.invocation_metadata() or () if k == "authorization"]
        try:
            # Anything but exactly one text counts as none.
            header = headers[0] if len(headers) == 1 and isinstance(headers[0], str) else None
            return self._verifier.verify_authorization(header)
        except TokenError as error:
            await refuse(context, error.status, f"sandbox token refused: {error.message}")

    async def opened(self, context: Context) -> AuthenticatedPeer:
        """The peer of a call that needs an opened boundary and a token of the same epoch."""
        peer = await self.peer(context)
        claims = await self.claims(context)
        if peer.auth_epoch is None:
            await refuse(context, StatusCode.FAILED_PRECONDITION, "the boundary was not opened on this connection")
        if peer.auth_epoch != claims.auth_epoch:
            await refuse(context, StatusCode.PERMISSION_DENIED, "the token is of another epoch than this connection")
        return AuthenticatedPeer(connection_id=peer.connection.id, auth_epoch=peer.auth_epoch)

    def forget(self, connection: PhysicalConnection) -> None:
        """The connection is gone."""
        peer = self._peers.pop(connection.id, None)
        if peer is not None:
            peer.end()


class ControlService(control_grpc.IsolationBackendServicer):
    """``openshell.isolation.backend.v1.IsolationBackend``."""

    def __init__(
        self, gate: PeerGate, *, bootstrap: BoundaryBootstrap, backend_name: str, metadata: extension_pb2.PeerMetadata
    ) -> None:
        self._gate = gate
        self._bootstrap = bootstrap
        self._backend_name = backend_name
        self._metadata = metadata

    async def GetCapabilities(  # noqa: N802 - named by the service
        self, request: control_pb2.GetIsolationCapabilitiesRequest, context: Context
    ) -> control_pb2.GetIsolationCapabilitiesResponse:
        """Negotiate; first on each connection, without a token."""
        await _check_size(request.ByteSize(), context)
        peer = await self._gate.peer(context)
        try:
            theirs = request.supervisor if request.HasField("supervisor") else None
            negotiate(self._metadata, theirs, peer="supervisor")
        except NegotiationError as error:
            await refuse(context, error.status, error.message)
        peer.negotiated = True
        return control_pb2.GetIsolationCapabilitiesResponse(backend=self._metadata)

    async def OpenBoundary(  # noqa: N802 - named by the service
        self, request: control_pb2.OpenBoundaryRequest, context: Context
    ) -> control_pb2.OpenBoundaryResponse:
        """Bind this connection to the boundary; runs nothing and may be repeated."""
        await _check_size(request.ByteSize(), context)
        peer = await self._gate.peer(context)
        claims = await self._gate.claims(context)
        if not peer.negotiated:
            await refuse(context, StatusCode.FAILED_PRECONDITION, "GetCapabilities must come first on each connection")
        expected = self._bootstrap
        asked = (request.backend_name, request.sandbox_id, request.generation_id, request.session_id)
        if asked != (self._backend_name, expected.boundary_id, expected.generation, expected.session_id):
            await refuse(context, StatusCode.PERMISSION_DENIED, LAUNCH_MISMATCH)
        try:
            descriptor = RuntimeDescriptor.from_json(request.driver_descriptor)
        except DocumentError as error:
            logger.warning("OpenBoundary with an undecodable descriptor: %s", error.message)
            await refuse(context, StatusCode.INVALID_ARGUMENT, INVALID_DESCRIPTOR)
        if not _describes(descriptor, expected):
            await refuse(context, StatusCode.PERMISSION_DENIED, CONTENT_MISMATCH)
        if peer.auth_epoch not in (None, claims.auth_epoch):
            await refuse(context, StatusCode.PERMISSION_DENIED, "a new credential epoch needs a new connection")
        peer.opened(claims.auth_epoch)
        outcome = control_pb2.OpenBoundaryResponse.LAUNCH_OUTCOME_FRESH
        return control_pb2.OpenBoundaryResponse(boundary_id=expected.boundary_id, outcome=outcome)

    async def SuspendBoundary(  # noqa: N802 - named by the service
        self, request: control_pb2.SuspendBoundaryRequest, context: Context
    ) -> control_pb2.SuspendBoundaryResponse:
        """Not offered: the suspend-resume capability is not advertised."""
        await self._gate.opened(context)
        await refuse(context, StatusCode.UNIMPLEMENTED, "suspending a boundary is not offered by this backend")

    async def ResumeBoundary(  # noqa: N802 - named by the service
        self, request: control_pb2.ResumeBoundaryRequest, context: Context
    ) -> control_pb2.OpenBoundaryResponse:
        """Not offered: the suspend-resume capability is not advertised."""
        await self._gate.peer(context)
        await self._gate.claims(context)
        await refuse(context, StatusCode.UNIMPLEMENTED, "resuming a boundary is not offered by this backend")


class StreamService(stream_grpc.DelegatedIsolationBoundaryServicer):
    """``openshell.sandbox.protocol.v1.DelegatedIsolationBoundary``."""

    def __init__(self, gate: PeerGate, *, boundary_id: str, session: BoundarySession) -> None:
        self._gate = gate
        self._boundary_id = boundary_id
        self._session = session

    async def Exchange(  # noqa: N802 - named by the service
        self, request_iterator: AsyncIterator[Chunk], context: Context
    ) -> AsyncIterator[Chunk]:
        """One operation: handle, request, result."""
        async for chunk in self._serve(request_iterator, context, mediation=False):
            yield chunk

    async def Mediate(  # noqa: N802 - named by the service
        self, request_iterator: AsyncIterator[Chunk], context: Context
    ) -> AsyncIterator[Chunk]:
        """Name resolution for the workload; takes ``open_mediation`` only."""
        async for chunk in self._serve(request_iterator, context, mediation=True):
            yield chunk

    async def _serve(
        self, request_iterator: AsyncIterator[Chunk], context: Context, *, mediation: bool
    ) -> AsyncIterator[Chunk]:
        peer = await self._gate.opened(context)
        try:
            async with asyncio.timeout(CONTROL_IO_SECONDS):
                await self._bind(request_iterator, context)
                payload = await _read_control(request_iterator)
            envelope = RequestEnvelope.from_json(payload)
        except TimeoutError:
            await refuse(context, StatusCode.DEADLINE_EXCEEDED, "no complete request arrived in 30 seconds")
        except (FramingError, DocumentError) as error:
            await refuse(context, error.status, error.message)
        if mediation != (envelope.request.get("operation") == OpenMediation.TAG[1]):
            result: Result = ErrorResult.of(DescriptorError("the operation belongs to the other stream method"))
        else:
            result = await self._answer(peer, envelope)
        response = ResponseEnvelope(request_id=envelope.request_id, response=result)
        for piece in chunks(encode_control(response.to_json())):
            yield Chunk(data=piece)

    async def _bind(self, request_iterator: AsyncIterator[Chunk], context: Context) -> None:
        first = await anext(request_iterator, None)
        if first is None or first.WhichOneof("payload") != "boundary_id":
            raise FramingError("the first frame must name the boundary")
        if not 0 < len(first.boundary_id.encode("utf-8")) <= MAX_HANDLE_BYTES:
            raise FramingError(f"a boundary id has 1 to {MAX_HANDLE_BYTES} bytes")
        if first.boundary_id != self._boundary_id:
            await refuse(context, StatusCode.PERMISSION_DENIED, "the stream names another boundary")
        # Both sides would wait for each other if this came with the first response.
        await context.send_initial_metadata(())

    async def _answer(self, peer: AuthenticatedPeer, envelope: RequestEnvelope) -> Result:
        try:
            return await self._session.handle(peer, envelope)
        except BackendError as error:
            return ErrorResult.of(error)
        except IsolationError as error:
            return ErrorResult.of(DescriptorError(error.message))
        except Exception:
            logger.exception("a request failed inside the boundary")
            return ErrorResult.of(BackendError("the boundary failed internally; its log has the cause"))


async def _read_control(request_iterator: AsyncIterator[Chunk]) -> bytes:
    buffer = FrameBuffer()
    async for chunk in request_iterator:
        if chunk.WhichOneof("payload") == "boundary_id":
            raise FramingError(ONLY_DATA)
        buffer.feed(chunk.data)
        payload = buffer.take_control()
        if payload is not None:
            return payload
    raise FramingError("the stream ended before its request was complete")


async def _check_size(size: int, context: Context) -> None:
    if size > MAX_CONTROL_RPC_BYTES:
        await refuse(
            context, StatusCode.RESOURCE_EXHAUSTED, f"a control message has at most {MAX_CONTROL_RPC_BYTES} bytes"
        )


def _describes(descriptor: RuntimeDescriptor, bootstrap: BoundaryBootstrap) -> bool:
    return (
        descriptor.boundary_id == bootstrap.boundary_id
        and descriptor.generation == bootstrap.generation
        and descriptor.session_id == bootstrap.session_id
        and descriptor.workload_identity == bootstrap.workload_identity
        and dict(descriptor.resource_claims) == dict(bootstrap.resource_claims)
        and descriptor.outer_fence == bootstrap.outer_fence
    )
