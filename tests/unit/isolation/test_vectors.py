"""The published request vectors of the Sandbox Protocol (isolation contract 3.5)."""

from __future__ import annotations

import json

import pytest

from openshell.isolation.canonical import canonical_json, payload_digest
from openshell.isolation.envelope import RequestEnvelope
from openshell.isolation.errors import DocumentError
from openshell.isolation.framing import FrameBuffer, encode_control
from openshell.isolation.operations import (
    REQUESTS,
    AcceptNetwork,
    AgentSpec,
    Attach,
    AttachProcess,
    Confirm,
    DiscoverPolicy,
    Exec,
    ExecSignal,
    ExecSpec,
    LandlockRequirement,
    LoopbackConnect,
    NetworkMode,
    OpenMediation,
    Policy,
    ProbeProviderFiles,
    Request,
    Resize,
    Signal,
    SignalProcess,
    StartAgent,
    Terminate,
    TerminateBoundary,
    UpdateProviderEnvironment,
    Wait,
)

MAIN = "generation-1:main"
POLICY = Policy(
    read_only=("/usr",),
    read_write=("/sandbox",),
    include_workdir=True,
    network=NetworkMode.BLOCK,
    landlock=LandlockRequirement.HARD_REQUIREMENT,
)
EXEC_EXPIRY = 1_800_000_000_000


def request_id(number: int) -> str:
    return f"00000000-0000-4000-8000-{number:012d}"


VECTORS: list[tuple[int, Request, str, int]] = [
    (1, DiscoverPolicy(), "f316ae675411d6d0fc8d903e8ec9fbd7c4cfcff90ba4b9a0ea42ee12e6ecb393", 0xB3),
    (
        2,
        Attach(
            supervisor_instance_id=request_id(2),
            policy=POLICY,
            resource_claims={
                "actor": "external-1",
                "\ue000": "bmp-last",
                "\U00010000": "astral-first",
                'quote"\\\n': "line\n\b\f\r\t\0\x1f / 雪 😀",
            },
        ),
        "6a398dbe0829e4833d9135b8d11e3913aee5a02eb90480289b5250ed939bfe13",
        0x236,
    ),
    (3, Confirm(), "c47c155e09b02a1684c146535ab246541a4775d433a91576130bf1a33462b67e", 0xAB),
    (4, ProbeProviderFiles(), "49d3b528d28661e09c4ac1534e4e6f2f2b9e7f8ee5bdd2fd2b6c0b7619392709", 0xB8),
    (
        5,
        StartAgent(
            sandbox_id="sandbox-1",
            spec=AgentSpec(program="/bin/true", workdir="/sandbox", timeout_secs=5),
            policy=POLICY,
            provider_env_revision=1,
            provider_env={"A": "first", "Z": "last"},
        ),
        "d330c975b9c419ed32b1c98976a041caa165293ecd3078dcbb3c4b3ff5014c0b",
        0x267,
    ),
    (
        6,
        UpdateProviderEnvironment(generation=9_007_199_254_740_993, revision=2),
        "d927db9193ba4efe4c4b2d19242b1a03d3fea01fce9bbba0e9871cea19f3b647",
        0x110,
    ),
    (
        7,
        AttachProcess(process_id=MAIN),
        "09735dc472b7fb71d3034b7d0e801f56618027ccdb2ba1d1850a29faa516b11f",
        0xD3,
    ),
    (8, Wait(process_id=MAIN), "e61da144ef7e66274658d99d77a8155d50a935510f5489d54465ca4c689d05db", 0xC9),
    (
        9,
        SignalProcess(process_id=MAIN, signal=Signal.TERM),
        "d91abab7d4835262bdada10f98d61994a9de5d6edfee33853c48d6952c08fc51",
        0xDB,
    ),
    (10, Terminate(process_id=MAIN), "d9197927a320eaeecd06e3b83bfbe9b8d1516479b7561d5125b0530e6a1549ad", 0xCE),
    (11, TerminateBoundary(), "fcb65e1ddb606a79abbbad448847b833e4135ca9cc2f9f8e455fbfc9c3837cc2", 0xB6),
    (
        12,
        Exec(
            spec=ExecSpec(
                program="/bin/echo",
                args=("héllo",),
                env=(("LANG", "C.UTF-8"), ("SPECIAL", 'quote" backslash\\ newline\n NUL\0 emoji😀')),
            )
        ),
        "a269e736f12f736c0c17bd19fc8ff5fb0fd700dd3e04379db81ab961c23c0878",
        0x19A,
    ),
    (
        13,
        ExecSignal(process_id="generation-1:exec", signal=Signal.KILL),
        "bc80382030d743852845bc35c200f7c9c51e76c5369acca6024f3d69b6d8bdb7",
        0xE0,
    ),
    (
        14,
        Resize(process_id=MAIN, cols=80, rows=24),
        "f51f875abe67b01093312c0536b7686b30a47ce3ea1bcfcd4206052fe44db356",
        0xDF,
    ),
    (
        15,
        LoopbackConnect(host="127.0.0.1", port=8080),
        "62c8b23330ea3c04bc820acdc50e77286b7439d541f626ae2c35ad3e3dc023d4",
        0xD3,
    ),
    (16, OpenMediation(), "ddc0eb31d09a4e3f8528f7c9e075d5f252739b6a0ff364995b42f52181249eb4", 0xB2),
    (17, AcceptNetwork(), "cc7045e9b9efe3b32d8082d881c8d872aabbc6c910edf20f9d3a9bc9e7d31f2e", 0xB2),
]


@pytest.mark.parametrize(("number", "request_", "digest", "length"), VECTORS, ids=[v[1].TAG[1] for v in VECTORS])
def test_digest_and_frame_length(number: int, request_: Request, digest: str, length: int) -> None:
    expiry = EXEC_EXPIRY if isinstance(request_, Exec) else None
    envelope = RequestEnvelope.of(request_, request_id=request_id(number), exec_expires_at_unix_ms=expiry)
    assert envelope.payload_digest == digest
    frame = encode_control(envelope.to_json())
    assert int.from_bytes(frame[:4], "big") == length == len(frame) - 4
    buffer = FrameBuffer()
    buffer.feed(frame)
    received = RequestEnvelope.from_json(buffer.take_control() or b"")
    assert received == envelope
    assert received.open() == request_


def test_the_vectors_cover_every_operation() -> None:
    assert {v[1].TAG[1] for v in VECTORS} == set(REQUESTS)


def test_keys_are_ordered_by_their_utf8_bytes() -> None:
    assert canonical_json({"\U00010000": 1, "\ue000": 2, "a": 3}) == '{"a":3,"\ue000":2,"\U00010000":1}'.encode()


def test_escapes_are_the_short_ones_and_nothing_else_is_escaped() -> None:
    assert canonical_json('\b\f\n\r\t"\\/\x1f\x7fé') == '"\\b\\f\\n\\r\\t\\"\\\\/\\u001f\x7fé"'.encode()


@pytest.mark.parametrize("value", [{"a": 1.0}, {"a": [{"b": float("nan")}]}, {"a": "\ud800"}])
def test_what_has_no_canonical_form_is_refused(value: dict[str, object]) -> None:
    with pytest.raises(DocumentError):
        payload_digest(value)


def test_large_integers_keep_every_digit() -> None:
    assert json.loads(canonical_json({"a": 2**53 + 1})) == {"a": 2**53 + 1}
