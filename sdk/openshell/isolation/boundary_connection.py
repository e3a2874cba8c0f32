"""One opened connection to a boundary: negotiated, bound, and good for any number of exchanges."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import NoReturn, TypeVar

import grpc
import grpc.aio

from openshell.isolation.channel import PhysicalChannel
from openshell.isolation.documents import RuntimeDescriptor
from openshell.isolation.envelope import RequestEnvelope, ResponseEnvelope
from openshell.isolation.errors import (
    DescriptorError,
    DocumentError,
    FramingError,
    IsolationError,
    NegotiationError,
    ProcessError,
    TokenError,
    TransportLostError,
    UnavailableError,
)
from openshell.isolation.framing import FrameBuffer, chunks, encode_control
from openshell.isolation.negotiation import PROTOCOL_MAJOR, PROTOCOL_MINOR, negotiate, our_metadata
from openshell.isolation.operations import ErrorResult, Result
from openshell.wire.isolation.backend.v1 import isolation_backend_pb2 as control_pb2
from openshell.wire.isolation.backend.v1 import isolation_backend_pb2_grpc as control_grpc
from openshell.wire.sandbox.protocol.v1 import sandbox_protocol_pb2 as stream_pb2
from openshell.wire.sandbox.protocol.v1 import sandbox_protocol_pb2_grpc as stream_grpc

CONTROL_RPC_SECONDS = 30.0
_STREAM_END_SECONDS = 1.0

Chunk = stream_pb2.DelegatedBoundaryChunk
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryTarget:
    """Which boundary is meant; the same for every connection to it.

    Attributes:
        descriptor: the parsed runtime descriptor.
        descriptor_json: its bytes as the driver wrote them, forwarded unchanged.
        backend_name: the admitted backend.
        implementation_version: our diagnostic version.
    """

    descriptor: RuntimeDescriptor
    descriptor_json: bytes = field(repr=False)
    backend_name: str
    implementation_version: str


class BoundaryConnection:
    """A physical connection on which the boundary was opened.

    Attributes:
        closed: set when the physical connection is gone.
        generation: number of this connection among its client's.
        peer_version: the backend's implementation name and version, diagnostic only.
    """

    def __init__(self, channel: PhysicalChannel, *, sandbox_token: str) -> None:
        self.closed: asyncio.Event = channel.closed
        self.generation = channel.generation
        self.peer_version = ""
        self._channel = channel
        self._metadata = _bearer(sandbox_token)
        self._control = control_grpc.IsolationBackendStub(channel.grpc)
        self._streams = stream_grpc.DelegatedIsolationBoundaryStub(channel.grpc)
        self._boundary_id = ""

    @classmethod
    async def open(cls, target: BoundaryTarget, *, sandbox_token: str, generation: int) -> BoundaryConnection:
        """Connect, negotiate and open the boundary, in this order (isolation contract 3.1).

        Raises:
            TransportLostError: nothing answers, or TLS failed.
            NegotiationError: version or capabilities do not fit.
            DescriptorError: the boundary is another than the descriptor says.
            TokenError: the boundary refuses the token.
        """
        descriptor = target.descriptor
        channel = await PhysicalChannel.connect(descriptor.transport, descriptor.tls, generation=generation)
        connection = cls(channel, sandbox_token=sandbox_token)
        try:
            await connection._negotiate(target)
            await connection._open_boundary(target)
        except BaseException:
            await channel.close()
            raise
        return connection

    async def exchange(self, envelope: RequestEnvelope, *, timeout_seconds: float | None) -> Result:
        """Send one request and read its result.

        Args:
            envelope: the request.
            timeout_seconds: limit, none for no limit.

        Raises:
            TransportLostError: the connection failed; nothing is known of the request.
            UnavailableError: no answer came in time.
            TokenError: the boundary no longer accepts the token.
            BackendError: the boundary's error frame.
        """
        if self.closed.is_set():
            raise TransportLostError("the connection to the boundary is gone")
        operation = str(envelope.request["operation"])
        call = self._streams.Exchange(metadata=self._metadata, timeout=timeout_seconds)
        try:
            payload = await self._round_trip(call, envelope)
            response = ResponseEnvelope.from_json(payload)
        except grpc.aio.AioRpcError as error:
            raise _stream_error(error, operation, closed=self.closed.is_set()) from None
        except asyncio.CancelledError:
            # grpcio reports a channel closed under a call as cancellation; only our own task's may leave as such.
            task = asyncio.current_task()
            if task is None or task.cancelling() or not self.closed.is_set():
                raise
            raise TransportLostError(f"{operation}: the connection was closed") from None
        except (FramingError, DocumentError) as error:
            raise DescriptorError(f"the boundary's answer to {operation} is malformed: {error.message}") from None
        finally:
            call.cancel()
        if response.request_id != envelope.request_id:
            raise DescriptorError(f"the boundary's answer to {operation} belongs to another request")
        if isinstance(response.response, ErrorResult):
            raise response.response.to_error()
        return response.response

    def use_token(self, sandbox_token: str) -> None:
        """Send another token of the same epoch from here on."""
        self._metadata = _bearer(sandbox_token)

    async def close(self) -> None:
        """Cut the physical connection; idempotent."""
        await self._channel.close()

    async def _round_trip(self, call: grpc.aio.StreamStreamCall[Chunk, Chunk], envelope: RequestEnvelope) -> bytes:
        ending = _Ending(call)
        try:
            for chunk in self._request_chunks(envelope):
                if call.done():
                    await _raise_status(call)
                await call.write(chunk)
            await call.done_writing()
        except asyncio.InvalidStateError:
            # The call ended while we wrote; its status says why.
            await _raise_status(call)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.INTERNAL:
                raise
            # grpcio's own word for a write on a call that has just ended.
            if (status := await ending.of_peer()) is not None:
                raise status from None
            raise TransportLostError("the stream ended while the request was being sent") from None
        buffer = FrameBuffer()
        async for chunk in _responses(call):
            if chunk.WhichOneof("payload") != "data":
                raise FramingError("responses hold data only")
            buffer.feed(chunk.data)
            payload = buffer.take_control()
            if payload is not None:
                # Let the stream end by itself: a reset for every request would look like an attack.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_STREAM_END_SECONDS):
                        await call.code()
                return payload
        return await _raise_status(call)

    def _request_chunks(self, envelope: RequestEnvelope) -> Iterator[Chunk]:
        yield Chunk(boundary_id=self._boundary_id)
        for piece in chunks(encode_control(envelope.to_json())):
            yield Chunk(data=piece)

    async def _negotiate(self, target: BoundaryTarget) -> None:
        ours = our_metadata("openshell-supervisor", target.implementation_version)
        request = control_pb2.GetIsolationCapabilitiesRequest(supervisor=ours)
        try:
            response = await self._control.GetCapabilities(request, timeout=CONTROL_RPC_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                versions = f"isolation protocol {PROTOCOL_MAJOR}.{PROTOCOL_MINOR} or this side's capabilities"
                words = error.details() or "no detail given"
                raise NegotiationError(
                    f"the boundary refuses {versions}: {words}", public=f"it refuses {versions}"
                ) from None
            raise _control_error(error, "negotiation", closed=self.closed.is_set()) from None
        theirs = response.backend if response.HasField("backend") else None
        negotiate(ours, theirs, peer="backend")
        self.peer_version = f"{response.backend.implementation_name} {response.backend.implementation_version}"

    async def _open_boundary(self, target: BoundaryTarget) -> None:
        descriptor = target.descriptor
        request = control_pb2.OpenBoundaryRequest(
            sandbox_id=descriptor.boundary_id,
            session_id=descriptor.session_id,
            generation_id=descriptor.generation,
            backend_name=target.backend_name,
            driver_descriptor=target.descriptor_json,
        )
        try:
            response = await self._control.OpenBoundary(request, metadata=self._metadata, timeout=CONTROL_RPC_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise _control_error(error, "OpenBoundary", closed=self.closed.is_set()) from None
        if not response.boundary_id:
            raise DescriptorError("the boundary opened without an id")
        self._boundary_id = response.boundary_id


class _Ending:
    """How a call ended, although a write failed on it.

    grpcio then puts a status of its own in the place of the peer's, before the peer's is read or after; each of the two
    is announced by the call's callbacks.
    """

    def __init__(self, call: grpc.aio.StreamStreamCall[Chunk, Chunk]) -> None:
        self._statuses: asyncio.Queue[grpc.aio.AioRpcError] = asyncio.Queue()
        call.add_done_callback(self._announced)

    async def of_peer(self) -> grpc.aio.AioRpcError | None:
        """The peer's status; none where it does not come at once, or is no better than grpcio's."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STREAM_END_SECONDS):
                for _ in range(2):
                    status = await self._statuses.get()
                    if status.code() not in (grpc.StatusCode.INTERNAL, grpc.StatusCode.OK):
                        return status
        return None

    def _announced(self, call: grpc.aio.StreamStreamCall[Chunk, Chunk]) -> None:
        code, details = _at_once(call.code()), _at_once(call.details())
        if code is not None:
            self._statuses.put_nowait(
                grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)
            )


def _at_once(asked: Coroutine[object, object, _T]) -> _T | None:
    """The result of a coroutine that has nothing to wait for; none where it waits after all."""
    try:
        asked.send(None)
    except StopIteration as ended:
        result: _T = ended.value
        return result
    asked.close()
    return None


def _bearer(token: str) -> tuple[tuple[str, str]]:
    return (("authorization", f"Bearer {token}"),)


async def _responses(call: grpc.aio.StreamStreamCall[Chunk, Chunk]) -> AsyncIterator[Chunk]:
    async for chunk in call:
        yield chunk


async def _raise_status(call: grpc.aio.StreamStreamCall[Chunk, Chunk]) -> NoReturn:
    code = await call.code()
    if code is grpc.StatusCode.OK:
        raise FramingError("the stream ended before its answer was complete")
    raise grpc.aio.AioRpcError(
        code, await call.initial_metadata(), await call.trailing_metadata(), details=await call.details()
    )


_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
_UNSURE = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)


def _is_lost(code: grpc.StatusCode, *, closed: bool) -> bool:
    # A connection that breaks mid-call may also show as one of the unsure codes.
    return code in _LOST or (closed and code in _UNSURE)


def _control_error(error: grpc.aio.AioRpcError, step: str, *, closed: bool) -> IsolationError:
    code, words = error.code(), error.details() or "no detail given"
    if _is_lost(code, closed=closed):
        return TransportLostError(f"{step}: {words}")
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return TokenError(words)
    # Never a Denied: that would read as a refusal of the sandbox's configuration.
    return DescriptorError(f"{step} refused ({code.name}): {words}")


def _stream_error(error: grpc.aio.AioRpcError, operation: str, *, closed: bool) -> IsolationError:
    code, words = error.code(), error.details() or "no detail given"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and not closed:
        # The keepalive tells a dead connection; this one lives and the request is late.
        return UnavailableError(f"{operation} was not answered in time")
    if _is_lost(code, closed=closed):
        return TransportLostError(f"{operation}: {words}")
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return TokenError(words)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return UnavailableError(f"{operation}: {words}")
    if code in _UNSURE:
        return ProcessError(f"{operation}: {words}")
    return DescriptorError(f"{operation} refused ({code.name}): {words}")
