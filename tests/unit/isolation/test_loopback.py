"""A supervisor's client against a served backend, over TLS on a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import stat
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import pytest
from scripted.isolation_boundary import POLICY, SESSION, Boundary, Keys, claims

from openshell.isolation import boundary_service, terminator
from openshell.isolation.client import BackendClient
from openshell.isolation.connection_states import Connected, Frozen, RuntimeState, Terminal
from openshell.isolation.documents import OuterFence, TcpTransport, TransportTls, UnixTransport, WorkloadIdentity
from openshell.isolation.endpoints import Transport
from openshell.isolation.errors import (
    AttachError,
    ConfirmError,
    DeniedError,
    DescriptorError,
    NegotiationError,
    ProcessError,
    TerminatedError,
    TokenError,
    TransportLostError,
    UnavailableError,
)
from openshell.isolation.negotiation import our_metadata
from openshell.isolation.operations import AgentSpec, ExitStatus, Signal, StartAgent, Started
from openshell.isolation.terminator import MAX_PENDING_HANDSHAKES
from openshell.isolation.tls import client_context, issue_session_tls
from openshell.isolation.tokens import mint_sandbox_token
from openshell.wire.isolation.backend.v1.isolation_backend_pb2 import GetIsolationCapabilitiesRequest
from openshell.wire.isolation.backend.v1.isolation_backend_pb2_grpc import IsolationBackendStub

SPEC = AgentSpec(program="/bin/true", workdir="/sandbox")


async def test_a_sandbox_runs_from_attach_to_exit(boundary: Boundary) -> None:
    client = await boundary.connect()
    assert (await client.discover_policy()).yaml == "version: 1\n"
    snapshot = await client.attach(POLICY)
    assert snapshot.generation == "generation-1"
    confirmation = await client.confirm()
    assert confirmation.backend_audit == {"toy": True}
    started = await client.start_agent(SPEC, POLICY, provider_env={"A": "1"}, provider_files={"f": b"\x00\xff"})
    assert boundary.backend.started_with is not None
    assert boundary.backend.started_with.provider_files == {"f": b"\x00\xff"}
    waiting = asyncio.create_task(client.wait(started.process_id))
    await boundary.backend.until("wait")
    await client.signal(started.process_id, Signal.TERM)
    assert await waiting == ExitStatus.signaled(15)
    assert (await client.wait(started.process_id)).exit_code == 143
    assert boundary.backend.calls[:4] == ["discover_policy", "attach", "confirm", "start_agent"]


async def test_the_socket_is_open_to_all_and_gone_after_close(boundary: Boundary) -> None:
    assert stat.S_IMODE(boundary.socket_path.stat().st_mode) == 0o666
    await boundary.server.close()
    assert list(boundary.socket_path.parent.iterdir()) == []


async def test_a_boundary_that_refuses_the_protocol_is_quoted_in_private_only(
    boundary: Boundary, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise NegotiationError("SECRET token=abc")

    monkeypatch.setattr(boundary_service, "negotiate", refuses)
    with pytest.raises(NegotiationError) as refused:
        await boundary.connect()
    assert "SECRET token=abc" in refused.value.message
    assert refused.value.public == "it refuses isolation protocol 1.0 or this side's capabilities"


@pytest.mark.parametrize(
    ("transport", "text"),
    [
        (UnixTransport(socket_path="/nowhere/c.sock"), "cannot connect to /nowhere/c.sock: No such file or directory"),
        (TcpTransport(authority="a", addresses=("127.0.0.1:1",)), "cannot connect to 127.0.0.1:1: .*refused|failed"),
    ],
)
async def test_what_cannot_be_connected_to_is_named(boundary: Boundary, transport: Transport, text: str) -> None:
    with pytest.raises(TransportLostError, match=text):
        await boundary.connect(descriptor=replace(boundary.descriptor, transport=transport))


async def test_a_token_of_another_key_is_refused(boundary: Boundary) -> None:
    stranger = Keys.generate()
    with pytest.raises(TokenError, match="signature does not verify"):
        await boundary.connect(token=mint_sandbox_token(claims(), key_id="key-1", private_key_pem=stranger.private_pem))


async def test_a_token_for_another_sandbox_is_refused(boundary: Boundary) -> None:
    with pytest.raises(TokenError, match="sandbox_id"):
        await boundary.connect(token=boundary.token(sandbox_id="sandbox-2"))


async def test_a_server_under_another_authority_is_refused(boundary: Boundary) -> None:
    other = issue_session_tls(SESSION)
    descriptor = replace(
        boundary.descriptor,
        tls=TransportTls(server_name=other.server_name, trust_anchor_pem=other.trust_anchor_pem),
    )
    with pytest.raises(TransportLostError, match="certificate was refused"):
        await boundary.connect(descriptor=descriptor)


async def test_a_server_with_another_name_is_refused(boundary: Boundary) -> None:
    tls = replace(boundary.descriptor.tls, server_name="sandbox.other.openshell.internal")
    with pytest.raises(TransportLostError, match=r"certificate was refused.*mismatch"):
        await boundary.connect(descriptor=replace(boundary.descriptor, tls=tls))


async def test_a_tls_1_2_client_is_refused(boundary: Boundary) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.load_verify_locations(cadata=boundary.session_tls.trust_anchor_pem)
    context.set_alpn_protocols(["h2"])
    # asyncio's server cuts the connection without an alert; that the version is why, test_tls proves on the context.
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await asyncio.open_unix_connection(
            boundary.socket_path, ssl=context, server_hostname=boundary.session_tls.server_name
        )


async def test_a_client_without_h2_is_cut(boundary: Boundary) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=boundary.session_tls.trust_anchor_pem)
    reader, writer = await asyncio.open_unix_connection(
        boundary.socket_path, ssl=context, server_hostname=boundary.session_tls.server_name
    )
    with contextlib.suppress(ConnectionError):
        assert await reader.read() == b""
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def test_more_pending_handshakes_than_allowed_cost_one_of_those_before(boundary: Boundary) -> None:
    loop = asyncio.get_running_loop()
    silent: list[socket.socket] = []
    heard: list[asyncio.Task[bytes]] = []
    try:
        for _ in range(MAX_PENDING_HANDSHAKES + 1):
            peer = socket.socket(socket.AF_UNIX)
            silent.append(peer)
            peer.setblocking(False)
            await loop.sock_connect(peer, str(boundary.socket_path))
            heard.append(asyncio.create_task(loop.sock_recv(peer, 1)))
        cut, _ = await asyncio.wait(heard, timeout=4, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result() for task in cut] == [b""]
        assert heard[-1] not in cut, "the newcomer may be the supervisor"
        await boundary.connect()
    finally:
        for task in heard:
            task.cancel()
        await asyncio.wait(heard)
        for peer in silent:
            peer.close()


async def test_peers_that_show_no_token_keep_no_place_from_the_supervisor(
    boundary: Boundary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminator, "MAX_CONNECTIONS", 6)
    supervisor = await running(boundary)
    context = client_context(trust_anchor_pem=boundary.session_tls.trust_anchor_pem)
    async with contextlib.AsyncExitStack() as opened:
        for _ in range(24):
            stranger, _ = await asyncio.get_running_loop().create_unix_connection(
                asyncio.Protocol,
                str(boundary.socket_path),
                ssl=context,
                server_hostname=boundary.session_tls.server_name,
            )
            opened.callback(stranger.abort)
        assert len(boundary.server._terminator.connections) <= 6
        again = await boundary.connect()
        assert not supervisor.connection_lost.is_set()
        assert not again.connection_lost.is_set()
        await supervisor.signal("generation-1:main", Signal.TERM)


async def test_peers_with_a_token_are_not_cut_for_another(boundary: Boundary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminator, "MAX_CONNECTIONS", 2)
    ours = [await boundary.connect(), await boundary.connect()]
    with pytest.raises(TransportLostError):
        await boundary.connect()
    assert not any(client.connection_lost.is_set() for client in ours)


async def test_nobody_answering_is_a_lost_transport(boundary: Boundary) -> None:
    descriptor = replace(boundary.descriptor, transport=UnixTransport(socket_path="/nonexistent/control.sock"))
    with pytest.raises(TransportLostError, match="No such file"):
        await boundary.connect(descriptor=descriptor)


async def test_a_plaintext_peer_that_did_not_pass_tls_is_refused(boundary: Boundary) -> None:
    inner = boundary.server._inner_name
    metadata = (("authorization", f"Bearer {boundary.token()}"),)
    async with grpc.aio.insecure_channel(f"unix-abstract:{inner}") as channel:
        stub = IsolationBackendStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetCapabilities(
                GetIsolationCapabilitiesRequest(supervisor=our_metadata("intruder", "0")), metadata=metadata
            )
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert "did not pass the TLS terminator" in (caught.value.details() or "")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"boundary_id": "sandbox-2"}, "boundary launch identity does not match runtime"),
        ({"session_id": "5f0c7f5e-0000-4000-8000-000000000002"}, "boundary launch identity does not match runtime"),
        ({"resource_claims": {"docker.container_id": "c2"}}, "driver descriptor does not match provisioned boundary"),
        (
            {"outer_fence": OuterFence.attest(generation="generation-1", evidence=b"x")},
            "driver descriptor does not match provisioned boundary",
        ),
        (
            {"workload_identity": WorkloadIdentity(uid=2, gid=2, resource_digest="d")},
            "driver descriptor does not match provisioned boundary",
        ),
    ],
)
async def test_another_boundary_than_the_provisioned_one_is_not_opened(
    boundary: Boundary, changes: dict[str, object], text: str
) -> None:
    descriptor = replace(boundary.descriptor, **changes)  # type: ignore[arg-type]
    with pytest.raises(DescriptorError, match=text):
        await boundary.connect(descriptor=descriptor)


async def test_another_backend_name_is_not_opened(boundary: Boundary) -> None:
    with pytest.raises(DescriptorError, match=r"PERMISSION_DENIED.*launch identity"):
        await boundary.connect(backend_name="other")


async def test_an_undecodable_descriptor_is_invalid(boundary: Boundary) -> None:
    with pytest.raises(DescriptorError, match="invalid OpenShell runtime descriptor"):
        await BackendClient.connect(
            boundary.descriptor, b"{}", sandbox_token=boundary.token(), supervisor_instance_id="instance-1"
        )


async def test_a_refusal_of_attach_is_told_from_a_fault(boundary: Boundary) -> None:
    client = await boundary.connect()
    boundary.backend.fail["attach"] = DeniedError("run_as_user 1500 is not the host's")
    with pytest.raises(DeniedError) as refused:
        await client.attach(POLICY)
    assert refused.value.is_refusal
    assert str(refused.value) == "attachment denied: run_as_user 1500 is not the host's"
    boundary.backend.fail["attach"] = AttachError("landlock is missing")
    with pytest.raises(DeniedError, match="landlock is missing") as failed:
        await client.attach(POLICY)
    assert failed.value.is_refusal
    boundary.backend.fail["attach"] = UnavailableError("not yet")
    with pytest.raises(UnavailableError) as unavailable:
        await client.attach(POLICY)
    assert not unavailable.value.is_refusal
    del boundary.backend.fail["attach"]
    await client.attach(POLICY)


async def test_confirmation_of_something_else_is_not_accepted(boundary: Boundary) -> None:
    client = await boundary.connect()
    await client.attach(POLICY)
    boundary.backend.bootstrap = replace(boundary.backend.bootstrap, resource_claims={"other": "1"})
    with pytest.raises(ConfirmError, match="resource_claims"):
        await client.confirm()


async def test_nothing_starts_before_confirm(boundary: Boundary) -> None:
    client = await boundary.connect()
    await client.attach(POLICY)
    with pytest.raises(UnavailableError, match="needs the confirmed connection"):
        await client.start_agent(SPEC, POLICY)
    assert "start_agent" not in boundary.backend.calls


async def test_the_agent_starts_once_and_under_the_attached_policy_only(boundary: Boundary) -> None:
    client = await boundary.connect()
    await client.attach(POLICY)
    await client.confirm()
    with pytest.raises(DescriptorError, match="policy differs"):
        await client.start_agent(SPEC, replace(POLICY, read_write=("/",)))
    await client.start_agent(SPEC, replace(POLICY, proxy_addr="127.0.0.1:3128"))
    with pytest.raises(ProcessError, match="already started"):
        await client.start_agent(SPEC, POLICY)
    assert boundary.backend.calls.count("start_agent") == 1


async def test_a_second_connection_of_the_same_epoch_is_refused_while_one_is_active(boundary: Boundary) -> None:
    first = await running(boundary)
    second = await boundary.connect()
    with pytest.raises(UnavailableError, match="another connection with this epoch is still active"):
        await second.attach(POLICY)
    stranger = await boundary.connect(instance="instance-2")
    with pytest.raises(DescriptorError, match="another supervisor instance"):
        await stranger.attach(POLICY)
    assert not first.connection_lost.is_set()
    await second.close()
    await stranger.close()
    assert connection_state(boundary) is Connected
    assert "freeze" not in boundary.backend.calls


async def test_losing_the_active_connection_freezes_and_coming_back_resumes(boundary: Boundary) -> None:
    first = await running(boundary)
    await first.close()
    await boundary.backend.until("freeze")
    assert connection_state(boundary) is Frozen
    again = await boundary.connect()
    with pytest.raises(UnavailableError, match="frozen"):
        await again.signal("generation-1:main", Signal.TERM)
    await again.attach(POLICY)
    assert "resume" not in boundary.backend.calls
    await again.confirm()
    await boundary.backend.until("resume")
    await again.signal("generation-1:main", Signal.TERM)
    assert await again.wait("generation-1:main") == ExitStatus.signaled(15)
    assert boundary.backend.calls.count("attach") == 1
    assert boundary.server.state.runtime is RuntimeState.RUNNING


async def test_a_newer_epoch_takes_over_after_the_loss(boundary: Boundary) -> None:
    first = await running(boundary)
    await first.close()
    await boundary.backend.until("freeze")
    successor = await boundary.connect(token=boundary.token(auth_epoch=2), instance="instance-2")
    with pytest.raises(DescriptorError, match="another policy") as other:
        await successor.attach(replace(POLICY, read_only=()))
    assert not other.value.is_refusal, "what already runs was not refused before it started"
    await successor.attach(POLICY)
    await successor.confirm()
    await boundary.backend.until("resume")
    late = await boundary.connect(instance="instance-1")
    with pytest.raises(DescriptorError, match="replaced by a newer one"):
        await late.attach(POLICY)


async def test_a_renewed_epoch_replaces_the_active_connection(boundary: Boundary) -> None:
    first = await running(boundary)
    renewed = await boundary.connect(token=boundary.token(auth_epoch=2))
    await renewed.attach(POLICY)
    assert not first.connection_lost.is_set()
    await renewed.confirm()
    async with asyncio.timeout(10):
        await first.connection_lost.wait()
    with pytest.raises(TransportLostError):
        await first.signal("generation-1:main", Signal.TERM)
    await renewed.signal("generation-1:main", Signal.TERM)
    assert "freeze" not in boundary.backend.calls


@pytest.mark.parametrize("recovery_seconds", [0.0])
async def test_a_supervisor_that_does_not_come_back_ends_the_boundary(boundary: Boundary) -> None:
    first = await running(boundary)
    await first.close()
    async with asyncio.timeout(10):
        await boundary.server.wait_terminal()
    assert "terminate_boundary" in boundary.backend.calls
    assert boundary.server.recovery_expired
    again = await boundary.connect()
    with pytest.raises(TerminatedError, match="sandbox session is terminating"):
        await again.attach(POLICY)


@pytest.mark.parametrize("recovery_seconds", [0.0])
async def test_a_supervisor_that_is_lost_before_it_started_the_agent_is_told_as_such(boundary: Boundary) -> None:
    client = await boundary.connect()
    await client.attach(POLICY)
    await client.confirm()
    await client.close()
    async with asyncio.timeout(10):
        await boundary.server.wait_terminal()
    assert boundary.server.recovery_expired


async def test_terminating_the_boundary_answers_and_can_be_repeated(boundary: Boundary) -> None:
    client = await running(boundary)
    await client.terminate_boundary()
    assert not boundary.server.recovery_expired
    assert connection_state(boundary) is Terminal
    await client.terminate_boundary()
    with pytest.raises(TerminatedError):
        await client.signal("generation-1:main", Signal.TERM)
    assert boundary.backend.calls.count("terminate_boundary") == 1


async def test_the_server_going_away_fails_what_is_pending(boundary: Boundary) -> None:
    client = await running(boundary)
    waiting = asyncio.create_task(client.wait("generation-1:main"))
    await boundary.backend.until("wait")
    await boundary.server.close()
    with pytest.raises(TransportLostError):
        await waiting
    async with asyncio.timeout(10):
        await client.connection_lost.wait()


async def test_closing_the_client_fails_what_is_pending(boundary: Boundary) -> None:
    client = await running(boundary)
    waiting = asyncio.create_task(client.wait("generation-1:main"))
    await boundary.backend.until("wait")
    await client.close()
    with pytest.raises(TransportLostError):
        await waiting


async def test_cancelling_a_wait_leaves_the_connection_usable(boundary: Boundary) -> None:
    client = await running(boundary)
    waiting = asyncio.create_task(client.wait("generation-1:main"))
    await boundary.backend.until("wait")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await client.signal("generation-1:main", Signal.TERM)


async def test_an_agent_start_survives_the_loss_of_its_connection(boundary: Boundary) -> None:
    client = await boundary.connect()
    await client.attach(POLICY)
    await client.confirm()
    gate = asyncio.Event()
    original = boundary.backend.start_agent

    async def slow(request: StartAgent) -> Started:
        await boundary.backend.note("starting")
        await gate.wait()
        return await original(request)

    boundary.backend.start_agent = slow  # type: ignore[method-assign]
    starting = asyncio.create_task(client.start_agent(SPEC, POLICY))
    await boundary.backend.until("starting")
    await client.close()
    with pytest.raises(TransportLostError):
        await starting
    gate.set()
    await boundary.backend.until("freeze")
    assert boundary.backend.calls.index("start_agent") < boundary.backend.calls.index("freeze")


async def test_an_unfreezable_workload_is_ended(boundary: Boundary) -> None:
    client = await running(boundary)
    boundary.backend.fail["freeze"] = ProcessError("no freezer")
    await client.close()
    async with asyncio.timeout(10):
        await boundary.server.wait_terminal()


async def test_a_workload_that_cannot_resume_stays_frozen(boundary: Boundary) -> None:
    client = await running(boundary)
    await client.close()
    await boundary.backend.until("freeze")
    boundary.backend.fail["resume"] = ProcessError("stuck")
    again = await boundary.connect()
    await again.attach(POLICY)
    with pytest.raises(UnavailableError, match="frozen workload could not be resumed"):
        await again.confirm()
    assert connection_state(boundary) is Frozen
    del boundary.backend.fail["resume"]
    await again.confirm()
    assert connection_state(boundary) is Connected


async def test_operations_that_are_not_offered_say_so(boundary: Boundary) -> None:
    client = await running(boundary)
    with pytest.raises(UnavailableError, match="update_provider_environment is not offered"):
        await client.update_provider_environment(generation=1, revision=2, provider_env={})
    assert not await client.supports_provider_files()


async def test_a_large_request_crosses_in_pieces(boundary: Boundary) -> None:
    client = await boundary.connect()
    await client.attach(POLICY)
    await client.confirm()
    files = {"blob": bytes(range(256)) * 700}
    await client.start_agent(SPEC, POLICY, provider_files=files)
    assert boundary.backend.started_with is not None
    assert boundary.backend.started_with.provider_files == files


async def test_a_request_beyond_the_frame_limit_is_refused_before_it_is_sent(boundary: Boundary) -> None:
    client = await boundary.connect()
    await client.attach(POLICY)
    await client.confirm()
    with pytest.raises(DescriptorError, match="exceeds 1048576"):
        await client.start_agent(SPEC, POLICY, provider_env={"A": "x" * 1_100_000})
    assert "start_agent" not in boundary.backend.calls


async def test_nothing_is_left_after_closing(boundary: Boundary) -> None:
    descriptors = open_descriptors()
    for _ in range(5):
        client = await boundary.connect()
        await client.discover_policy()
        await client.close()
    async with asyncio.timeout(10):
        for connection in tuple(boundary.server._terminator._unreleased):
            await connection.relay.released.wait()
    assert boundary.server._terminator.connections == ()
    assert boundary.server._gate._peers == {}
    ours = [t.get_name() for t in asyncio.all_tasks() if t.get_name().startswith(("tls-", "boundary-", "request-"))]
    assert ours == ["tls-terminator-accept"]
    assert open_descriptors() <= descriptors + 2


def connection_state(boundary: Boundary) -> type:
    return type(boundary.server.state.connection)


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def running(boundary: Boundary) -> BackendClient:
    client = await boundary.connect()
    await client.attach(POLICY)
    await client.confirm()
    await client.start_agent(SPEC, POLICY)
    return client
