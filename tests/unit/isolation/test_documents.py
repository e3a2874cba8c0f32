"""The documents: exact JSON, round trips, and errors that name the field and not the value."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted.isolation_boundary import GENERATION, SANDBOX, SESSION, Keys, make_bootstrap, make_descriptor

from openshell.isolation.documents import (
    AuthBundle,
    BackendRegistration,
    BoundaryBootstrap,
    BoundaryLaunch,
    DocumentError,
    IsolationBackends,
    LaunchAuthentication,
    ListenerTls,
    MainProcessSpec,
    OuterFence,
    RuntimeDescriptor,
    TcpTransport,
    TransportTls,
    UnixListener,
    UnixTransport,
    VsockTransport,
    WorkloadIdentity,
)
from openshell.isolation.endpoints import read_listener, read_transport
from openshell.isolation.errors import cause_of
from openshell.isolation.json_fields import Fields
from openshell.isolation.tls import issue_session_tls

KEYS = Keys.generate()
BOOTSTRAP = make_bootstrap(KEYS, Path("/.openshell/channel/control.sock"))
DESCRIPTOR = make_descriptor(BOOTSTRAP, Path("/.openshell/channel/control.sock"), issue_session_tls(SESSION))
BUNDLE = AuthBundle(
    session_id=SESSION,
    runtime_generation=GENERATION,
    session_rotation=1,
    auth_epoch=1,
    gateway_token="gateway-secret",
    gateway_expires_at=10,
    sandbox_token="sandbox-secret",
    sandbox_expires_at=0,
)
AUTHENTICATION = LaunchAuthentication(supervisor=BUNDLE, gateway_id="gateway-1", verification_keys=(KEYS.verification,))
LAUNCH = BoundaryLaunch(
    backend_name="external",
    sandbox_id=SANDBOX,
    generation=GENERATION,
    session_id=SESSION,
    workload_identity=BOOTSTRAP.workload_identity,
    tls=DESCRIPTOR.tls,
    resource_claims={"a": "b"},
    outer_fence=BOOTSTRAP.outer_fence,
)
BACKENDS = IsolationBackends(
    backends=(
        BackendRegistration(name="a", endpoint=UnixTransport(socket_path="/run/a.sock")),
        BackendRegistration(name="b", endpoint=TcpTransport(authority="b.test", addresses=("10.0.0.1:1", "[::1]:2"))),
        BackendRegistration(name="c", endpoint=VsockTransport(guest_cid=3, port=1)),
    )
)

Parser = Callable[[bytes], object]
DOCUMENTS: list[tuple[object, Parser]] = [
    (BOOTSTRAP, BoundaryBootstrap.from_json),
    (DESCRIPTOR, RuntimeDescriptor.from_json),
    (BUNDLE, AuthBundle.from_json),
    (AUTHENTICATION, LaunchAuthentication.from_json),
    (LAUNCH, BoundaryLaunch.from_json),
    (BACKENDS, IsolationBackends.from_json),
    (MainProcessSpec(command=("/bin/sh", "-c", "true"), tty=True), MainProcessSpec.from_json),
]
IDS = [type(document).__name__ for document, _ in DOCUMENTS]


def written(document: object) -> bytes:
    return cast("bytes", document.to_json())  # type: ignore[attr-defined]


@pytest.mark.parametrize(("document", "parse"), DOCUMENTS, ids=IDS)
def test_documents_survive_a_round_trip(document: object, parse: Parser) -> None:
    assert parse(written(document)) == document


@pytest.mark.parametrize(("document", "parse"), DOCUMENTS, ids=IDS)
def test_unknown_and_missing_members_are_named(document: object, parse: Parser) -> None:
    members = json.loads(written(document))
    with pytest.raises(DocumentError, match=r"\.surprise: is not a known field"):
        parse(json.dumps({**members, "surprise": "hunter2"}).encode())
    optional = {"resource_claim_files", "child_env", "host_gateway_ip", "await_main_process_attachment"}
    for key in set(members) - optional:
        with pytest.raises(DocumentError, match=rf"{key}.*is missing"):
            parse(json.dumps({k: v for k, v in members.items() if k != key}).encode())


@pytest.mark.parametrize(("document", "parse"), DOCUMENTS, ids=IDS)
@given(junk=st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), st.lists, max_leaves=4))
def test_members_of_a_wrong_type_are_refused_with_a_typed_error(document: object, parse: Parser, junk: object) -> None:
    members = json.loads(written(document))
    for key in members:
        try:
            parse(json.dumps({**members, key: junk}).encode())
        except DocumentError as error:
            assert key in error.field or key == "outer_fence" or "generation" in error.field


@pytest.mark.parametrize(("document", "parse"), DOCUMENTS, ids=IDS)
@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"{", b'{"a":1,"a":2}', b"\xff", b"[" * 100_000, b'{"a":NaN}'])
def test_what_is_no_document_is_refused(document: object, parse: Parser, data: bytes) -> None:
    with pytest.raises(DocumentError):
        parse(data)


def test_the_bootstrap_has_the_contracts_form() -> None:
    members = json.loads(BOOTSTRAP.to_json())
    assert list(members) == [
        "boundary_id",
        "generation",
        "session_id",
        "session_rotation",
        "auth_epoch",
        "gateway_id",
        "verification_keys",
        "listener",
        "resource_claims",
        "resource_claim_files",
        "workload_identity",
        "outer_fence",
        "child_env",
    ]
    assert members["listener"] == {
        "kind": "unix",
        "socket_path": "/.openshell/channel/control.sock",
        "tls": {"certificate_chain_path": "/tls/chain.pem", "private_key_path": "/tls/key.pem"},
    }
    assert members["verification_keys"] == [{"key_id": "key-1", "public_key_pem": KEYS.verification.public_key_pem}]
    assert members["workload_identity"] == {
        "uid": 1000,
        "gid": 1000,
        "supplementary_gids": [],
        "source": "default",
        "resource_digest": "sha256:1",
    }


def test_the_descriptor_has_the_contracts_form() -> None:
    members = json.loads(DESCRIPTOR.to_json())
    assert list(members) == [
        "boundary_id",
        "generation",
        "session_id",
        "workload_identity",
        "transport",
        "tls",
        "host_gateway_ip",
        "resource_claims",
        "outer_fence",
    ]
    assert members["transport"] == {"kind": "unix", "socket_path": "/.openshell/channel/control.sock"}
    assert list(members["tls"]) == ["server_name", "trust_anchor_pem"]
    assert json.loads(replace(DESCRIPTOR, host_gateway_ip=None).to_json())["host_gateway_ip"] is None


def test_public_keys_are_byte_arrays_in_launch_authentication() -> None:
    members = json.loads(AUTHENTICATION.to_json())
    assert bytes(members["verification_keys"][0]["public_key_pem"]).decode() == KEYS.verification.public_key_pem


def test_the_supervisor_object_is_kept_verbatim() -> None:
    odd = b'{ "session_rotation":1,\n "session_id" : "%s", "runtime_generation":"generation-1","auth_epoch":1,' % (
        SESSION.encode()
    )
    odd += '"gateway_token":"gé{}\\u00e9","gateway_expires_at":1,"sandbox_token":"s","sandbox_expires_at":2 }'.encode()
    members = json.loads(AUTHENTICATION.to_json())
    keys = json.dumps(members["verification_keys"]).encode()
    data = b' {"gateway_id":"g", "supervisor" :' + odd + b' , "verification_keys":' + keys + b"}"
    document = LaunchAuthentication.from_json(data)
    assert document.supervisor_json == odd
    assert AuthBundle.from_json(document.supervisor_json) == document.supervisor
    assert document.supervisor.gateway_token == "gé{}é"


def test_newer_bundles_may_hold_a_host_key() -> None:
    bundle = replace(BUNDLE, ssh_host_private_key="key-secret")
    assert AuthBundle.from_json(bundle.to_json()) == bundle
    assert "ssh_host_private_key" not in json.loads(BUNDLE.to_json())


def test_secrets_stay_out_of_repr_and_errors() -> None:
    bundle = replace(BUNDLE, ssh_host_private_key="key-secret")
    document = replace(AUTHENTICATION, supervisor=bundle, supervisor_json=b"")
    assert "secret" not in repr(document)
    assert "secret" not in repr(bundle)
    members = json.loads(bundle.to_json())
    for key in members:
        with pytest.raises(DocumentError) as caught:
            AuthBundle.from_json(json.dumps({**members, key: ["secret"]}).encode())
        assert "secret" not in str(caught.value).replace(key, "")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"session_id": "not-a-uuid"}, "supervisor.session_id"),
        ({"session_id": SESSION.upper()}, "supervisor.session_id"),
        ({"session_id": "00000000-0000-0000-0000-000000000000"}, "supervisor.session_id"),
        ({"runtime_generation": "G"}, "supervisor.runtime_generation"),
        ({"runtime_generation": "g" * 65}, "supervisor.runtime_generation"),
        ({"session_rotation": 0}, "supervisor.session_rotation"),
        ({"auth_epoch": 0}, "supervisor.auth_epoch"),
        ({"auth_epoch": True}, "supervisor.auth_epoch"),
        ({"auth_epoch": 1.0}, "supervisor.auth_epoch"),
        ({"gateway_token": ""}, "supervisor.gateway_token"),
        ({"sandbox_expires_at": -1}, "supervisor.sandbox_expires_at"),
    ],
)
def test_bundle_rules(change: dict[str, object], field: str) -> None:
    with pytest.raises(DocumentError) as caught:
        AuthBundle.from_json(json.dumps({**json.loads(BUNDLE.to_json()), **change}).encode())
    assert caught.value.field == field


@pytest.mark.parametrize(
    "keys",
    [
        [],
        [{"key_id": "a", "public_key_pem": [1]}, {"key_id": "a", "public_key_pem": [1]}],
        [{"key_id": "a", "public_key_pem": "text"}],
        [{"key_id": "a", "public_key_pem": [256]}],
        [{"key_id": "a", "public_key_pem": [255]}],
        [{"key_id": "", "public_key_pem": [1]}],
    ],
)
def test_verification_key_rules(keys: list[object]) -> None:
    members = {**json.loads(AUTHENTICATION.to_json()), "verification_keys": keys}
    with pytest.raises(DocumentError, match="verification_keys"):
        LaunchAuthentication.from_json(json.dumps(members).encode())


@pytest.mark.parametrize(
    ("uid", "gid", "groups"),
    [
        (0, 1, ()),
        (1, 0, ()),
        (2**32, 1, ()),
        (1, 1, (0,)),
        (1, 1, (1,)),
        (1, 2, (4, 3)),
        (1, 2, (3, 3)),
    ],
)
def test_identity_rules(uid: int, gid: int, groups: tuple[int, ...]) -> None:
    with pytest.raises(DocumentError, match="workload_identity"):
        WorkloadIdentity(uid=uid, gid=gid, supplementary_gids=groups, resource_digest="d")


def test_the_fence_digest_binds_generation_and_evidence() -> None:
    evidence = b'{"network_mode":"none"}'
    fence = OuterFence.attest(generation="gen-1", evidence=evidence)
    assert fence.evidence_digest == hashlib.sha256(b"\0\0\0\0\0\0\0\x05gen-1" + evidence).hexdigest()
    assert [g.value for g in fence.established] == [
        "default_deny_egress",
        "no_unmanaged_egress_path",
        "revocation_verified",
        "controller_loss_fails_closed",
    ]
    assert fence.attests(evidence)
    assert not fence.attests(evidence + b" ")


@pytest.mark.parametrize("drop", range(4))
def test_a_missing_guarantee_is_rejected(drop: int) -> None:
    members = json.loads(DESCRIPTOR.to_json())
    del members["outer_fence"]["established"][drop]
    with pytest.raises(DocumentError, match=r"outer_fence\.established"):
        RuntimeDescriptor.from_json(json.dumps(members).encode())


def test_a_fence_of_another_generation_is_rejected() -> None:
    with pytest.raises(DocumentError, match=r"outer_fence\.generation"):
        replace(DESCRIPTOR, outer_fence=OuterFence.attest(generation="other", evidence=b""))


@pytest.mark.parametrize("claims", [{"": "a"}, {"a": ""}, {"a b": "c"}, {"a": "b\n"}])
def test_claim_rules(claims: dict[str, str]) -> None:
    with pytest.raises(DocumentError, match="resource_claims"):
        replace(BOOTSTRAP, resource_claims=claims)


@pytest.mark.parametrize("address", ["::1", "localhost", "1.2.3", ""])
def test_the_host_gateway_is_an_ipv4_address(address: str) -> None:
    with pytest.raises(DocumentError, match="host_gateway_ip"):
        replace(DESCRIPTOR, host_gateway_ip=address)


@pytest.mark.parametrize(
    "endpoint",
    [
        {"kind": "pipe"},
        {"kind": "unix", "socket_path": "relative.sock"},
        {"kind": "tcp", "authority": "a", "addresses": []},
        {"kind": "tcp", "authority": "a", "addresses": ["1.2.3.4:0"]},
        {"kind": "tcp", "authority": "a", "addresses": ["0.0.0.0:1"]},
        {"kind": "tcp", "authority": "a", "addresses": ["[::]:1"]},
        {"kind": "tcp", "authority": "a", "addresses": ["::1:1"]},
        {"kind": "tcp", "authority": "a", "addresses": ["host:1"]},
    ],
)
def test_endpoint_rules(endpoint: dict[str, object]) -> None:
    data = json.dumps({"backends": [{"name": "a", "endpoint": endpoint}]}).encode()
    with pytest.raises(DocumentError, match="invalid boundary control transport endpoint"):
        IsolationBackends.from_json(data)


@pytest.mark.parametrize(("cid", "port"), [(2, 1), (2**32 - 1, 1), (3, 0), (3, 2**32 - 1)])
def test_vsock_rules(cid: int, port: int) -> None:
    endpoint = {"kind": "vsock", "guest_cid": cid, "port": port}
    with pytest.raises(DocumentError, match="endpoint"):
        IsolationBackends.from_json(json.dumps({"backends": [{"name": "a", "endpoint": endpoint}]}).encode())


@pytest.mark.parametrize("name", ["", "openshell-sandbox", "a b", "é", "x" * 129])
def test_backend_names(name: str) -> None:
    with pytest.raises(DocumentError):
        BackendRegistration(name=name, endpoint=UnixTransport(socket_path="/a"))


def test_duplicate_backends_are_refused() -> None:
    entry = BackendRegistration(name="a", endpoint=UnixTransport(socket_path="/a"))
    with pytest.raises(DocumentError, match="duplicate isolation backend registration"):
        IsolationBackends(backends=(entry, entry))


def test_main_process_forms() -> None:
    spec = MainProcessSpec(command=("/bin/sh", "-c", "echo é"), await_main_process_attachment=True)
    assert json.loads(spec.to_json()) == {
        "version": 1,
        "command": ["/bin/sh", "-c", "echo é"],
        "tty": False,
        "await_main_process_attachment": True,
    }
    assert MainProcessSpec.from_json(spec.to_base64()) == spec
    assert MainProcessSpec.from_json('{"version":1,"command":[],"tty":true}') == MainProcessSpec(tty=True)
    for bad in ('{"version":2,"command":[],"tty":true}', "base64url:!", "base64url:e30"):
        with pytest.raises(DocumentError):
            MainProcessSpec.from_json(bad)


def test_child_environment_must_be_an_environment() -> None:
    for name, value in (("", "v"), ("A=B", "v"), ("A", "\0")):
        with pytest.raises(DocumentError, match="child_env"):
            replace(BOOTSTRAP, child_env={name: value})
    assert "C.UTF-8" not in repr(BOOTSTRAP)


def test_a_trust_anchor_stays_out_of_repr() -> None:
    assert "CERTIFICATE" not in repr(TransportTls(server_name="n", trust_anchor_pem="-----BEGIN CERTIFICATE-----"))


def test_documents_need_the_standard_library_only() -> None:
    code = (
        "import sys; import openshell.isolation.documents, openshell.isolation.errors, openshell.isolation.canonical;"
        "import openshell.isolation.framing, openshell.isolation.envelope, openshell.isolation.connection_states;"
        "bad = {'grpc', 'cryptography', 'google', 'jwt'} & {m.partition('.')[0] for m in sys.modules};"
        "sys.exit(str(bad) if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


TOO_LONG = "/" + "é" * 53 + "x"


@pytest.mark.parametrize(
    "make",
    [
        lambda: UnixTransport(socket_path=TOO_LONG),
        lambda: UnixListener(socket_path=TOO_LONG, tls=ListenerTls(certificate_chain_path="/c", private_key_path="/k")),
        lambda: read_transport(Fields({"kind": "unix", "socket_path": TOO_LONG}, "backends[0].endpoint")),
        lambda: read_listener(
            Fields(
                {
                    "kind": "unix",
                    "socket_path": TOO_LONG,
                    "tls": {"certificate_chain_path": "/c", "private_key_path": "/k"},
                },
                "bootstrap.listener",
            )
        ),
    ],
)
def test_a_path_that_no_socket_can_have_is_refused_by_name_and_limit(make: Callable[[], object]) -> None:
    with pytest.raises(DocumentError, match=r"socket_path: has 108 bytes; .* at most 107 bytes"):
        make()
    assert UnixTransport(socket_path=TOO_LONG[:-1]).socket_path == TOO_LONG[:-1]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError("AF_UNIX path too long"), "AF_UNIX path too long"),
        (OSError(2, "No such file or directory", "/x"), "No such file or directory"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_what_is_known_of_a_failure_is_told(error: OSError, text: str) -> None:
    assert cause_of(error) == text
