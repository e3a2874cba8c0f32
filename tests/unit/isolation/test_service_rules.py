"""What the two services demand of a peer, asked with bare gRPC over the real channel."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
import socket
import subprocess
import sys
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
from scripted.isolation_boundary import GENERATION, SANDBOX, SESSION, Boundary

from openshell.isolation import boundary_service, channel
from openshell.isolation.canonical import payload_digest
from openshell.isolation.channel import PhysicalChannel
from openshell.isolation.envelope import RequestEnvelope, ResponseEnvelope
from openshell.isolation.errors import ErrorKind
from openshell.isolation.framing import FrameBuffer, encode_control
from openshell.isolation.negotiation import our_metadata
from openshell.isolation.operations import (
    DiscoverPolicy,
    ErrorResult,
    ImagePolicy,
    OpenMediation,
    Request,
    Result,
    Wait,
)
from openshell.isolation.relay import Relay
from openshell.wire.extension.v1.extension_pb2 import PeerMetadata, ProtocolVersion
from openshell.wire.isolation.backend.v1 import isolation_backend_pb2 as control_pb2
from openshell.wire.isolation.backend.v1.isolation_backend_pb2_grpc import IsolationBackendStub
from openshell.wire.sandbox.protocol.v1.sandbox_protocol_pb2 import DelegatedBoundaryChunk as Chunk
from openshell.wire.sandbox.protocol.v1.sandbox_protocol_pb2_grpc import DelegatedIsolationBoundaryStub


class Bare:
    """Both stubs on one physical connection, with nothing done for the test."""

    def __init__(self, boundary: Boundary, physical: PhysicalChannel) -> None:
        self.physical = physical
        self.boundary = boundary
        self.control = IsolationBackendStub(physical.grpc)
        self.streams = DelegatedIsolationBoundaryStub(physical.grpc)
        self.bearer = (("authorization", f"Bearer {boundary.token()}"),)

    async def negotiate(self) -> None:
        await self.control.GetCapabilities(
            control_pb2.GetIsolationCapabilitiesRequest(supervisor=our_metadata("test", "0"))
        )

    def launch(self, **changes: object) -> control_pb2.OpenBoundaryRequest:
        values: dict[str, object] = {
            "sandbox_id": SANDBOX,
            "session_id": SESSION,
            "generation_id": GENERATION,
            "backend_name": "openshell-sandbox",
            "driver_descriptor": self.boundary.descriptor.to_json(),
            **changes,
        }
        return control_pb2.OpenBoundaryRequest(**values)  # type: ignore[arg-type]

    async def open(self) -> None:
        await self.negotiate()
        await self.control.OpenBoundary(self.launch(), metadata=self.bearer)

    async def refused(self, *frames: Chunk) -> grpc.aio.AioRpcError:
        call = self.streams.Exchange(iter(frames), metadata=self.bearer)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        return caught.value

    async def ask(self, payload: bytes, *, mediate: bool = False) -> Result:
        frames = [Chunk(boundary_id=SANDBOX), Chunk(data=b""), Chunk(data=encode_control(payload))]
        method = self.streams.Mediate if mediate else self.streams.Exchange
        buffer = FrameBuffer()
        async for chunk in method(iter(frames), metadata=self.bearer):
            buffer.feed(chunk.data)
        return ResponseEnvelope.from_json(buffer.take_control() or b"").response

    async def ask_for(self, request: Request, *, mediate: bool = False) -> Result:
        return await self.ask(RequestEnvelope.of(request).to_json(), mediate=mediate)


@pytest.fixture
async def bare(boundary: Boundary) -> AsyncIterator[Bare]:
    physical = await PhysicalChannel.connect(boundary.descriptor.transport, boundary.descriptor.tls)
    try:
        yield Bare(boundary, physical)
    finally:
        await physical.close()


def code(caught: pytest.ExceptionInfo[grpc.aio.AioRpcError]) -> grpc.StatusCode:
    return caught.value.code()


async def test_negotiation_needs_no_token_and_tells_both_capabilities(bare: Bare) -> None:
    answer = await bare.control.GetCapabilities(
        control_pb2.GetIsolationCapabilitiesRequest(supervisor=our_metadata("test", "0"))
    )
    assert (answer.backend.protocol_version.major, answer.backend.protocol_version.minor) == (1, 0)
    assert list(answer.backend.supported_capabilities) == ["openshell.isolation.contract"]
    assert list(answer.backend.required_capabilities) == ["openshell.isolation.contract"]


async def test_another_major_version_is_a_failed_precondition(bare: Bare) -> None:
    theirs = PeerMetadata(protocol_version=ProtocolVersion(major=2), implementation_name="new")
    with pytest.raises(grpc.aio.AioRpcError, match=r"2\.0") as caught:
        await bare.control.GetCapabilities(control_pb2.GetIsolationCapabilitiesRequest(supervisor=theirs))
    assert code(caught) is grpc.StatusCode.FAILED_PRECONDITION
    with pytest.raises(grpc.aio.AioRpcError, match="metadata") as missing:
        await bare.control.GetCapabilities(control_pb2.GetIsolationCapabilitiesRequest())
    assert code(missing) is grpc.StatusCode.FAILED_PRECONDITION


async def test_opening_needs_negotiation_on_this_connection(bare: Bare) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="GetCapabilities must come first") as caught:
        await bare.control.OpenBoundary(bare.launch(), metadata=bare.bearer)
    assert code(caught) is grpc.StatusCode.FAILED_PRECONDITION


async def test_opening_needs_a_token(bare: Bare) -> None:
    await bare.negotiate()
    with pytest.raises(grpc.aio.AioRpcError, match="no authorization") as caught:
        await bare.control.OpenBoundary(bare.launch())
    assert code(caught) is grpc.StatusCode.UNAUTHENTICATED
    with pytest.raises(grpc.aio.AioRpcError, match="no authorization"):
        await bare.control.OpenBoundary(bare.launch(), metadata=(*bare.bearer, *bare.bearer))


async def test_opening_twice_gives_the_same_boundary(bare: Bare) -> None:
    await bare.negotiate()
    answers = [await bare.control.OpenBoundary(bare.launch(), metadata=bare.bearer) for _ in range(2)]
    assert answers[0] == answers[1]
    assert answers[0].boundary_id == SANDBOX
    assert answers[0].outcome == control_pb2.OpenBoundaryResponse.LAUNCH_OUTCOME_FRESH


async def test_another_epoch_needs_another_connection(bare: Bare) -> None:
    await bare.open()
    newer = (("authorization", f"Bearer {bare.boundary.token(auth_epoch=2)}"),)
    with pytest.raises(grpc.aio.AioRpcError, match="new connection") as caught:
        await bare.control.OpenBoundary(bare.launch(), metadata=newer)
    assert code(caught) is grpc.StatusCode.PERMISSION_DENIED
    bare.bearer = newer
    assert (await bare.refused(Chunk(boundary_id=SANDBOX))).code() is grpc.StatusCode.PERMISSION_DENIED


async def test_an_oversized_control_message_is_refused(bare: Bare) -> None:
    await bare.negotiate()
    with pytest.raises(grpc.aio.AioRpcError, match="65536") as caught:
        await bare.control.OpenBoundary(bare.launch(driver_descriptor=b"x" * 65536), metadata=bare.bearer)
    assert code(caught) is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_suspend_and_resume_are_unimplemented(bare: Bare) -> None:
    await bare.open()
    with pytest.raises(grpc.aio.AioRpcError) as suspend:
        await bare.control.SuspendBoundary(control_pb2.SuspendBoundaryRequest(), metadata=bare.bearer)
    with pytest.raises(grpc.aio.AioRpcError) as resume:
        await bare.control.ResumeBoundary(control_pb2.ResumeBoundaryRequest(), metadata=bare.bearer)
    assert code(suspend) is code(resume) is grpc.StatusCode.UNIMPLEMENTED


async def test_a_stream_needs_an_opened_boundary(bare: Bare) -> None:
    await bare.negotiate()
    assert (await bare.refused(Chunk(boundary_id=SANDBOX))).code() is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize(
    ("frames", "status", "text"),
    [
        ([], grpc.StatusCode.INVALID_ARGUMENT, "must name the boundary"),
        ([Chunk(data=b"x")], grpc.StatusCode.INVALID_ARGUMENT, "must name the boundary"),
        ([Chunk(boundary_id="")], grpc.StatusCode.INVALID_ARGUMENT, "1 to 128"),
        ([Chunk(boundary_id="é" * 65)], grpc.StatusCode.INVALID_ARGUMENT, "1 to 128"),
        ([Chunk(boundary_id="other")], grpc.StatusCode.PERMISSION_DENIED, "another boundary"),
        (
            [Chunk(boundary_id=SANDBOX), Chunk(data=b"\0"), Chunk(boundary_id=SANDBOX)],
            grpc.StatusCode.INVALID_ARGUMENT,
            "only data frames are allowed after boundary binding",
        ),
        ([Chunk(boundary_id=SANDBOX), Chunk(data=b"\0\0\0")], grpc.StatusCode.INVALID_ARGUMENT, "before its request"),
        (
            [Chunk(boundary_id=SANDBOX), Chunk(data=b"\xff\xff\xff\xff")],
            grpc.StatusCode.INVALID_ARGUMENT,
            "exceeds 1048576",
        ),
        (
            [Chunk(boundary_id=SANDBOX), Chunk(data=encode_control(b"{}"))],
            grpc.StatusCode.INVALID_ARGUMENT,
            r"envelope\.request: is missing",
        ),
    ],
)
async def test_malformed_streams(bare: Bare, frames: list[Chunk], status: grpc.StatusCode, text: str) -> None:
    await bare.open()
    error = await bare.refused(*frames)
    assert error.code() is status
    assert re.search(text, error.details() or "")


async def test_initial_metadata_comes_before_the_request_is_read(bare: Bare) -> None:
    await bare.open()
    call = bare.streams.Exchange(metadata=bare.bearer)
    await call.write(Chunk(boundary_id=SANDBOX))
    async with asyncio.timeout(10):
        await call.initial_metadata()
    call.cancel()


async def test_a_bound_stream_answers_and_ends(bare: Bare) -> None:
    await bare.open()
    assert await bare.ask_for(DiscoverPolicy()) == ImagePolicy(yaml="version: 1\n")


async def test_a_wrong_digest_is_denied_in_an_error_result(bare: Bare) -> None:
    await bare.open()
    members = json.loads(RequestEnvelope.of(DiscoverPolicy()).to_json())
    members["payload_digest"] = "0" * 64
    result = await bare.ask(json.dumps(members).encode())
    assert result == ErrorResult(kind=ErrorKind.DENIED, message="control request payload digest mismatch")
    assert bare.boundary.backend.calls == []


async def test_an_unknown_operation_is_invalid_in_an_error_result(bare: Bare) -> None:
    await bare.open()
    envelope = json.loads(RequestEnvelope.of(DiscoverPolicy()).to_json())
    request = {"operation": "fly"}
    envelope.update(request=request, payload_digest=payload_digest(request))
    result = await bare.ask(json.dumps(envelope).encode())
    assert isinstance(result, ErrorResult)
    assert result.kind is ErrorKind.INVALID


async def test_each_stream_method_takes_its_own_operations(bare: Bare) -> None:
    await bare.open()
    wrong = [await bare.ask_for(OpenMediation()), await bare.ask_for(Wait(process_id="p"), mediate=True)]
    assert all(isinstance(r, ErrorResult) and r.kind is ErrorKind.INVALID for r in wrong)
    refused = await bare.ask_for(OpenMediation(), mediate=True)
    assert isinstance(refused, ErrorResult)
    assert refused.kind is ErrorKind.UNAVAILABLE


async def test_a_connection_that_never_opens_is_cut(boundary: Boundary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boundary_service, "CONTROL_IO_SECONDS", 0.0)
    physical = await PhysicalChannel.connect(boundary.descriptor.transport, boundary.descriptor.tls)
    async with contextlib.AsyncExitStack() as opened:
        opened.push_async_callback(physical.close)
        async with asyncio.timeout(10):
            await physical.closed.wait()


async def test_a_plaintext_peer_under_a_name_of_its_own_is_refused(boundary: Boundary, bare: Bare) -> None:
    """Somebody who binds an abstract name and speaks HTTP/2 to the inner socket, while a real connection lives."""
    loop = asyncio.get_running_loop()
    async with contextlib.AsyncExitStack() as opened:
        relay = Relay()
        near = opened.enter_context(socket.socket(socket.AF_UNIX))
        near.setblocking(False)
        near.bind(f"\0openshell-{secrets.token_hex(16)}")
        near.connect(f"\0{boundary.server._inner_name}")
        await loop.create_unix_connection(lambda: relay.inner, sock=near)
        opened.push_async_callback(relay.released.wait)
        opened.callback(relay.abort)
        front = opened.enter_context(channel._reserve_local())
        name = front.getsockname()[1:].decode()
        intruder = await opened.enter_async_context(grpc.aio.insecure_channel(f"unix-abstract:{name}"))
        intruder.get_state(try_to_connect=True)
        accepted, _ = await loop.sock_accept(front)
        await loop.connect_accepted_socket(lambda: relay.outer, accepted)
        relay.join()
        with pytest.raises(grpc.aio.AioRpcError, match="did not pass the TLS terminator") as caught:
            await IsolationBackendStub(intruder).GetCapabilities(
                control_pb2.GetIsolationCapabilitiesRequest(supervisor=our_metadata("intruder", "0"))
            )
    assert code(caught) is grpc.StatusCode.PERMISSION_DENIED


async def test_the_clients_local_socket_knows_its_own_process() -> None:
    with channel._reserve_local() as listener:
        await _knows_its_own_process(listener)


async def _knows_its_own_process(listener: socket.socket) -> None:
    listener.setblocking(True)
    name = listener.getsockname()
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as ours:
        ours.connect(name)
        accepted, _ = listener.accept()
        with accepted:
            assert channel._is_ourselves(accepted)
    script = "import socket,sys; s=socket.socket(socket.AF_UNIX); s.connect(chr(0)+sys.argv[1]); sys.stdin.read()"
    stranger = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, name[1:].decode(), stdin=subprocess.PIPE
    )
    accepted, _ = listener.accept()
    with accepted:
        assert not channel._is_ourselves(accepted)
    await stranger.communicate(b"")
