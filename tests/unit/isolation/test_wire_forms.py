"""Envelopes, frames, requests and results: round trips, limits, and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openshell.isolation import operations as ops
from openshell.isolation.envelope import RequestEnvelope, ResponseEnvelope
from openshell.isolation.errors import (
    BackendError,
    DeniedError,
    DescriptorError,
    DocumentError,
    ErrorKind,
    FramingError,
    ProcessError,
    TerminatedError,
    UnavailableError,
)
from openshell.isolation.framing import (
    MAX_CHUNK_BYTES,
    MAX_CONTROL_BYTES,
    MAX_PROCESS_BYTES,
    DnsFrame,
    DnsKind,
    FrameBuffer,
    IoChannel,
    ProcessFrame,
    TcpDenial,
    chunks,
    decode_exit_status,
    decode_tcp_decision,
    encode_control,
    encode_dns,
    encode_exit_status,
    encode_output,
    encode_process,
    encode_tcp_decision,
)
from openshell.isolation.identity import OuterFence, WorkloadIdentity
from openshell.isolation.results import RESULTS
from openshell.isolation.tls import issue_session_tls

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
maybe_text = st.none() | text
u64 = st.integers(0, 2**64 - 1)
env = st.dictionaries(text, text, max_size=4)
files = st.dictionaries(text, st.binary(max_size=40), max_size=3)
policies = st.builds(
    ops.Policy,
    version=st.integers(0, 2**32 - 1),
    read_only=st.lists(text, max_size=3).map(tuple),
    read_write=st.lists(text, max_size=3).map(tuple),
    include_workdir=st.booleans(),
    network=st.sampled_from(ops.NetworkMode),
    proxy_addr=maybe_text,
    landlock=st.sampled_from(ops.LandlockRequirement),
    run_as_user=maybe_text,
    run_as_group=maybe_text,
)
agents = st.builds(
    ops.AgentSpec,
    program=text,
    args=st.lists(text, max_size=3).map(tuple),
    workdir=maybe_text,
    timeout_secs=u64,
    interactive=st.booleans(),
)
execs = st.builds(
    ops.ExecSpec,
    program=text,
    args=st.lists(text, max_size=3).map(tuple),
    env=st.lists(st.tuples(text, text), max_size=3).map(tuple),
    workdir=maybe_text,
    pty=st.booleans(),
    shell=st.none() | st.builds(ops.ShellCommand, command=text, login=st.booleans()),
    runtime_helper=st.none() | st.sampled_from(ops.RuntimeHelper),
)
requests: st.SearchStrategy[ops.Request] = st.one_of(
    st.builds(ops.DiscoverPolicy),
    st.builds(ops.Attach, supervisor_instance_id=text, policy=policies, resource_claims=env),
    st.builds(
        ops.StartAgent,
        sandbox_id=text,
        spec=agents,
        policy=policies,
        ca_cert=st.none() | st.binary(max_size=40),
        ca_bundle=st.none() | st.binary(max_size=40),
        provider_env_revision=u64,
        provider_env=env,
        provider_files=files,
    ),
    st.builds(ops.UpdateProviderEnvironment, generation=u64, revision=u64, provider_env=env, provider_files=files),
    st.builds(ops.SignalProcess, process_id=text, signal=st.sampled_from(ops.Signal)),
    st.builds(ops.Resize, process_id=text, cols=st.integers(0, 65535), rows=st.integers(0, 65535)),
    st.builds(ops.LoopbackConnect, host=text, port=st.integers(1, 65535)),
)
statuses = st.builds(ops.ExitStatus, kind=st.sampled_from(ops.ExitKind), value=st.integers(-(2**31), 2**31 - 1))
executables = st.builds(ops.ExecutableIdentity, path=text, digest=text)
properties = st.builds(
    ops.Properties,
    **{
        name: st.builds(ops.EnforcedProperty, enforced=st.booleans(), mechanism=text)
        for name in ("filesystem_confinement", "egress_interception", "request_attribution", "privilege_floor")
    },
)
results: st.SearchStrategy[ops.Result] = st.one_of(
    st.builds(ops.ImagePolicy, yaml=maybe_text, invalid=st.booleans()),
    st.builds(
        ops.Attached,
        snapshot=st.builds(
            ops.SessionSnapshot,
            generation=text,
            processes=st.lists(
                st.builds(
                    ops.ProcessSnapshot,
                    process_id=text,
                    kind=st.sampled_from(ops.ProcessKind),
                    terminal=st.booleans(),
                    status=st.none() | statuses,
                    retained_output=st.builds(
                        ops.RetainedOutput, first_sequence=u64, next_sequence=u64, truncated=st.booleans()
                    ),
                ),
                max_size=2,
            ).map(tuple),
        ),
    ),
    st.builds(
        ops.Confirmed,
        confirmation=st.builds(
            ops.Confirmation,
            generation=text,
            identity=st.just(WorkloadIdentity(uid=1, gid=1, supplementary_gids=(2, 3), resource_digest="d")),
            properties=properties,
            session_id=text,
            outer_fence=st.just(OuterFence.attest(generation="g", evidence=b"e")),
            resource_claims=env,
            backend_audit=st.none() | st.dictionaries(text, text, max_size=2),
        ),
    ),
    st.builds(ops.Started, process_id=text, provider_env_revision=u64, provider_env_generation=u64),
    st.builds(ops.Exited, status=statuses),
    st.builds(
        ops.NetworkConnected,
        identity=st.builds(
            ops.ResolvedBinary,
            executable=executables,
            ancestors=st.lists(executables, max_size=2).map(tuple),
            cmdline_paths=st.lists(text, max_size=2).map(tuple),
        )
        | st.builds(ops.UnresolvedBinary, message=text),
        destination=text,
        socket=st.builds(ops.SocketMetadata, socket_cookie=u64, nonblocking=st.booleans(), process_generation=u64),
        policy_generation=u64,
        timing=st.builds(ops.ConnectTiming, notification_to_queue_us=u64, queue_wait_us=u64),
    ),
    st.builds(ops.ErrorResult, kind=st.sampled_from(ErrorKind), message=text),
)


@given(requests)
def test_requests_survive_the_wire(request_: ops.Request) -> None:
    envelope = RequestEnvelope.of(request_)
    assert RequestEnvelope.from_json(envelope.to_json()).open() == request_


@given(results)
def test_results_survive_the_wire(result: ops.Result) -> None:
    envelope = ResponseEnvelope(request_id="r", response=result)
    assert ResponseEnvelope.from_json(envelope.to_json()) == envelope


def test_every_result_has_one_name() -> None:
    assert len(RESULTS) == 17
    assert all(("result", name) == cls.TAG for name, cls in RESULTS.items())


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_with_a_typed_error(data: bytes) -> None:
    for parse in (RequestEnvelope.from_json, ResponseEnvelope.from_json):
        with pytest.raises(DocumentError):
            parse(data)


def tampered(change: Callable[[dict[str, object]], None]) -> RequestEnvelope:
    members = json.loads(RequestEnvelope.of(ops.Wait(process_id="p"), request_id="r").to_json())
    change(members)
    return RequestEnvelope.from_json(json.dumps(members).encode())


def test_a_changed_payload_is_denied() -> None:
    envelope = tampered(lambda m: m.update(request={"operation": "wait", "process_id": "q"}))
    with pytest.raises(DeniedError, match="control request payload digest mismatch"):
        envelope.open()


def test_a_changed_exec_expiry_is_denied() -> None:
    envelope = RequestEnvelope.of(ops.Exec(spec=ops.ExecSpec(program="/bin/true")), exec_expires_at_unix_ms=5)
    with pytest.raises(DeniedError):
        replace(envelope, exec_expires_at_unix_ms=6).open()


def test_an_expiry_belongs_to_exec_only() -> None:
    with pytest.raises(DocumentError, match="exec_expires_at_unix_ms"):
        RequestEnvelope.of(ops.Confirm(), exec_expires_at_unix_ms=5).open()
    with pytest.raises(DocumentError, match="exec_expires_at_unix_ms"):
        RequestEnvelope.of(ops.Exec(spec=ops.ExecSpec(program="/bin/true"))).open()


@pytest.mark.parametrize(
    ("payload", "key"),
    [
        ({"operation": "fly"}, "request.operation"),
        ({"operation": "wait"}, "request.process_id"),
        ({"operation": "wait", "process_id": 1}, "request.process_id"),
        ({"operation": "wait", "process_id": "p", "extra": 1}, "request.extra"),
        ({"operation": "signal", "process_id": "p", "signal": "stop"}, "request.signal"),
        ({"operation": "resize", "process_id": "p", "cols": 65536, "rows": 1}, "request.cols"),
        ({"operation": "resize", "process_id": "p", "cols": True, "rows": 1}, "request.cols"),
        ({"operation": "loopback_connect", "host": "h", "port": 0}, "request.port"),
        ([], "request"),
    ],
)
def test_a_malformed_request_names_the_field(payload: object, key: str) -> None:
    with pytest.raises(DocumentError) as caught:
        ops.request_from_object(payload)
    assert caught.value.field == key


def test_results_of_a_newer_peer_may_say_more() -> None:
    result = ops.result_from_object({"result": "exec_started", "process_id": "p", "pty": False, "new": 1})
    assert result == ops.ExecStarted(process_id="p", pty=False)


def test_secrets_stay_out_of_repr() -> None:
    start = ops.StartAgent(
        sandbox_id="s",
        spec=ops.AgentSpec(),
        policy=ops.Policy(),
        provider_env={"TOKEN": "hunter2"},
        provider_files={"f": b"hunter2"},
        ca_cert=b"hunter2",
    )
    tls = issue_session_tls("5f0c7f5e-0000-4000-8000-000000000001")
    assert "hunter2" not in repr(start)
    assert "hunter2" not in repr(RequestEnvelope.of(start))
    assert "PRIVATE KEY" not in repr(tls)


@pytest.mark.parametrize(
    ("kind", "error", "refusal", "display"),
    [
        (ErrorKind.DENIED, DeniedError, True, "attachment denied: words"),
        (ErrorKind.UNAVAILABLE, UnavailableError, False, "boundary unavailable: words"),
        (ErrorKind.TERMINATED, TerminatedError, False, "boundary terminated: words"),
        (ErrorKind.INVALID, DescriptorError, False, "descriptor error: words"),
        (ErrorKind.PROCESS, ProcessError, False, "process error: words"),
    ],
)
def test_wire_kinds_become_errors(kind: ErrorKind, error: type[BackendError], refusal: bool, display: str) -> None:
    got = ops.ErrorResult(kind=kind, message="words").to_error()
    assert type(got) is error
    assert got.is_refusal is refusal
    assert str(got) == display
    assert ops.ErrorResult.of(got) == ops.ErrorResult(kind=kind, message="words")


def test_a_peers_words_are_bounded_and_clean() -> None:
    error = ops.ErrorResult(kind=ErrorKind.DENIED, message="a\x1b[31m\n" + "é" * 5000).to_error()
    assert len(error.message.encode()) <= 1024
    assert error.message.isprintable()
    assert ops.ErrorResult(kind=ErrorKind.DENIED, message="\n").to_error().message == "no further detail"


frames = st.builds(
    ProcessFrame,
    channel=st.sampled_from([c for c in IoChannel if c is not IoChannel.STDIN_CLOSED]),
    payload=st.binary(max_size=300),
)


@given(st.lists(frames, max_size=6), st.integers(1, 50))
def test_process_frames_survive_any_cut(sent: list[ProcessFrame], step: int) -> None:
    data = b"".join(encode_process(f) for f in sent)
    buffer = FrameBuffer()
    received: list[ProcessFrame] = []
    for start in range(0, len(data), step):
        buffer.feed(data[start : start + step])
        while (frame := buffer.take_process()) is not None:
            received.append(frame)
    assert received == sent
    assert len(buffer) == 0


@given(st.sampled_from(DnsKind), u64, st.binary(max_size=300))
def test_dns_frames_survive(kind: DnsKind, stream_id: int, payload: bytes) -> None:
    frame = DnsFrame(kind=kind, stream_id=stream_id, payload=payload)
    buffer = FrameBuffer()
    buffer.feed(encode_dns(frame) + b"rest")
    assert buffer.take_dns() == frame
    assert buffer.take_raw() == b"rest"


@given(statuses)
def test_exit_statuses_survive(status: ops.ExitStatus) -> None:
    buffer = FrameBuffer()
    buffer.feed(encode_exit_status(status))
    frame = buffer.take_process()
    assert frame is not None
    assert frame.channel is IoChannel.EXIT_STATUS
    assert decode_exit_status(frame.payload) == status


@pytest.mark.parametrize("denial", [None, *TcpDenial])
def test_decisions_survive(denial: TcpDenial | None) -> None:
    buffer = FrameBuffer()
    buffer.feed(encode_tcp_decision(denial))
    frame = buffer.take_process()
    assert frame is not None
    assert decode_tcp_decision(frame.payload) == denial


@given(st.binary(max_size=60).filter(lambda b: b"RelayReady" not in b))
def test_a_malformed_decision_denies(payload: bytes) -> None:
    assert decode_tcp_decision(payload) is not None


@pytest.mark.parametrize("reason", ["[1]", "{}", "null", "true", "1", '"Elsewhere"', "[]"])
def test_a_decision_of_the_right_shape_without_a_known_reason_denies(reason: str) -> None:
    assert decode_tcp_decision(f'{{"Denied": {reason}}}'.encode()) is TcpDenial.MEDIATION_UNAVAILABLE


@pytest.mark.parametrize(
    "data",
    [
        (MAX_CONTROL_BYTES + 1).to_bytes(4, "big"),
    ],
)
def test_an_oversized_control_frame_is_refused_by_its_header(data: bytes) -> None:
    buffer = FrameBuffer()
    buffer.feed(data)
    with pytest.raises(FramingError, match="exceeds 1048576"):
        buffer.take_control()


@pytest.mark.parametrize(
    "data",
    [
        bytes([1]) + (MAX_PROCESS_BYTES + 1).to_bytes(4, "big"),
        bytes([6]) + (0).to_bytes(4, "big"),
        bytes([IoChannel.STDIN_CLOSED]) + (1).to_bytes(4, "big"),
    ],
)
def test_bad_process_frames_are_refused_by_their_header(data: bytes) -> None:
    buffer = FrameBuffer()
    buffer.feed(data)
    with pytest.raises(FramingError):
        buffer.take_process()


def test_limits_hold_when_sending_too() -> None:
    encode_control(b"x" * MAX_CONTROL_BYTES)
    with pytest.raises(FramingError):
        encode_control(b"x" * (MAX_CONTROL_BYTES + 1))
    with pytest.raises(FramingError):
        encode_process(ProcessFrame(channel=IoChannel.STDOUT, payload=b"x" * (MAX_PROCESS_BYTES + 1)))
    with pytest.raises(FramingError):
        encode_dns(DnsFrame(kind=DnsKind.QUERY, stream_id=2**64, payload=b""))
    with pytest.raises(FramingError):
        encode_dns(DnsFrame(kind=DnsKind.QUERY, stream_id=1, payload=b"x" * 262_145))


@given(st.binary(max_size=200_000))
def test_output_is_cut_into_frames_and_chunks(data: bytes) -> None:
    buffer = FrameBuffer()
    for frame in encode_output(IoChannel.STDOUT, data):
        for piece in chunks(frame):
            assert len(piece) <= MAX_CHUNK_BYTES
            buffer.feed(piece)
    joined = b""
    while (got := buffer.take_process()) is not None:
        joined += got.payload
    assert joined == data
