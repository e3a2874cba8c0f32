"""The operator's table of isolation backends, what of it can be placed, and the pin (isolation contract 2.5, 5.4)."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted.compute_gateway import launch_authentication, sandbox

from driver_docker.config_sources import load_config
from driver_docker.documents import LaunchDocuments, build_documents
from driver_docker.engine_objects import ContainerFacts, ContainerStatus, HealthStatus, ImageFacts
from driver_docker.errors import ConfigurationError, PreconditionError
from driver_docker.isolation_backends import check_pin, check_placeable, parse_registrations
from driver_docker.labels import Owner
from driver_docker.plan import LaunchPlan, plan_launch
from driver_docker.records import RECORD_FILE, RecordStore
from driver_docker.requests import decode_sandbox
from driver_docker.sandbox_record import RecordPhase, SandboxRecord
from driver_docker.staging import supervisor_entries
from driver_docker.supervisor_files import SupervisorFileError, read_delegation
from openshell.isolation.documents import (
    BoundaryLaunch,
    IdentitySource,
    IsolationBackends,
    RuntimeDescriptor,
    TcpTransport,
    UnixTransport,
    VsockTransport,
    WorkloadIdentity,
)
from openshell.isolation.tls import issue_session_tls

if TYPE_CHECKING:
    from driver_docker.config import DriverConfig
    from driver_docker.isolation_backends import RegisteredBackend

ENDPOINT = "invalid boundary control transport endpoint"
NAME = "invalid or reserved delegated backend name"
UNIX = {"kind": "unix", "socket_path": "/run/acme/backend.sock"}
TCP = {"kind": "tcp", "authority": "backend.acme", "addresses": ["192.0.2.7:7443", "[2001:db8::7]:7443"]}
VSOCK = {"kind": "vsock", "guest_cid": 3, "port": 1024}
U32_MAX = 2**32 - 1


def _one(table: dict[str, Any], name: str = "acme") -> RegisteredBackend:
    return parse_registrations({name: table})[name]


@pytest.mark.parametrize(
    ("table", "endpoint"),
    [
        (UNIX, UnixTransport(socket_path="/run/acme/backend.sock")),
        (TCP, TcpTransport(authority="backend.acme", addresses=("192.0.2.7:7443", "[2001:db8::7]:7443"))),
        (VSOCK, VsockTransport(guest_cid=3, port=1024)),
        (
            {**VSOCK, "guest_cid": U32_MAX - 1, "port": U32_MAX - 1},
            VsockTransport(guest_cid=U32_MAX - 1, port=U32_MAX - 1),
        ),
        ({**VSOCK, "port": 1}, VsockTransport(guest_cid=3, port=1)),
    ],
)
def test_each_kind_of_endpoint_is_read(table: dict[str, Any], endpoint: object) -> None:
    assert _one(table).registration.endpoint == endpoint


@pytest.mark.parametrize(
    "table",
    [
        {},
        {"kind": "pipe", "socket_path": "/x"},
        {"kind": "unix"},
        {"kind": "unix", "socket_path": "run/acme.sock"},
        {"kind": "unix", "socket_path": ""},
        {"kind": "unix", "socket_path": "/run/a", "mode": "0666"},
        {**TCP, "addresses": []},
        {**TCP, "addresses": ["192.0.2.7:0"]},
        {**TCP, "addresses": ["0.0.0.0:7443"]},
        {**TCP, "addresses": ["[::]:7443"]},
        {**TCP, "addresses": ["192.0.2.7"]},
        {**TCP, "addresses": ["backend.acme:7443"]},
        {**TCP, "addresses": ["192.0.2.7:65536"]},
        {**TCP, "addresses": "192.0.2.7:7443"},
        {**TCP, "authority": ""},
        {"kind": "tcp", "addresses": ["192.0.2.7:7443"]},
        {**VSOCK, "guest_cid": 2},
        {**VSOCK, "guest_cid": U32_MAX},
        {**VSOCK, "port": 0},
        {**VSOCK, "port": U32_MAX},
        {**VSOCK, "port": "1024"},
        {**VSOCK, "port": True},
        {"kind": "vsock", "guest_cid": 3},
    ],
)
def test_a_wrong_endpoint_is_refused_in_the_contracts_words_even_if_nobody_uses_it(table: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError) as refused:
        _config(isolation_backends={"acme": table, "other": UNIX})
    assert f"isolation_backends: acme: {ENDPOINT}" in refused.value.message


@pytest.mark.parametrize("name", ["", "openshell-sandbox", "a b", "é", "a/b", "n" * 129])
def test_a_wrong_or_reserved_name_is_refused_in_the_contracts_words(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{NAME}$"):
        parse_registrations({name: UNIX})


@given(st.text(alphabet="abcXYZ019-_.", min_size=1, max_size=128))
def test_every_name_of_the_grammar_is_read(name: str) -> None:
    assert _one(UNIX, name).name == name


def test_a_duplicate_is_refused_in_the_contracts_words() -> None:
    """A table cannot hold one name twice; the list form, which the gateway's own file has, can."""
    twice = tomllib.loads(
        "[[isolation_backends]]\nname='a'\nkind='vsock'\nguest_cid=3\nport=1\n"
        "[[isolation_backends]]\nname='a'\nkind='unix'\nsocket_path='/run/a/b'\n"
    )
    with pytest.raises(ConfigurationError, match="duplicate isolation backend registration"):
        _config(**twice)


@pytest.mark.parametrize("value", [7, "acme", [UNIX, 7], {"acme": 7}, [{"name": 7, **UNIX}], [UNIX]])
def test_what_is_no_table_of_tables_is_refused(value: object) -> None:
    with pytest.raises(ConfigurationError, match="isolation_backends"):
        _config(isolation_backends=value)


def _config(**keys: Any) -> DriverConfig:
    return load_config({"bind_socket": Path("/run/x/d.sock")} | keys, environment={})


def _selected(table: dict[str, Any], **keys: Any) -> DriverConfig:
    trust = {"server_name": "backend.acme", "trust_anchor": "/etc/acme/ca.pem"}
    return _config(isolation_backend="acme", isolation_backends={"acme": {**trust, **table}}, **keys)


@pytest.mark.parametrize("selection", [{}, {"isolation_backend": "openshell-sandbox"}])
def test_without_a_selection_the_built_in_backend_is_used(selection: dict[str, str]) -> None:
    config = _config(isolation_backends={"acme": VSOCK}, **selection)
    assert (config.backend_name, config.delegated_backend) == ("openshell-sandbox", None)


def test_a_selection_that_is_not_registered_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="backend not registered: Acme"):
        _config(isolation_backend="Acme", isolation_backends={"acme": UNIX})


@pytest.mark.parametrize(
    ("table", "word"),
    [
        (VSOCK, "no vsock port"),
        ({"kind": "unix", "socket_path": "/backend.sock"}, "folder of its own"),
        ({"kind": "unix", "socket_path": "/run/a:b/backend.sock"}, "no ':'"),
        ({"kind": "unix", "socket_path": "/run/a/" + "b" * 78}, "108 bytes"),
        ({**UNIX, "server_name": None}, "server_name"),
        ({**TCP, "trust_anchor": None}, "trust_anchor"),
    ],
)
def test_a_selection_that_cannot_be_placed_keeps_the_driver_from_starting(table: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        _selected(table)
    assert "isolation_backend: " in refused.value.message
    assert word in refused.value.message


def test_a_socket_whose_folder_cannot_be_looked_at_is_one_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.stat", refuse)
    with pytest.raises(PreconditionError, match="does not exist on this host, or the driver cannot see it"):
        check_placeable(_one(UNIX), engine_is_local=True)


def test_a_socket_whose_folder_is_not_here_is_refused_before_anything_is_created(tmp_path: Path) -> None:
    here = _one({"kind": "unix", "socket_path": str(tmp_path / "b.sock")})
    check_placeable(here, engine_is_local=True)
    with pytest.raises(PreconditionError, match="does not exist"):
        check_placeable(_one({"kind": "unix", "socket_path": str(tmp_path / "none" / "b.sock")}), engine_is_local=True)
    with pytest.raises(PreconditionError, match="not known to be on this host"):
        check_placeable(here, engine_is_local=False)
    for local in (True, False):
        check_placeable(_one(TCP), engine_is_local=local)


IDENTITY = WorkloadIdentity(uid=1200, gid=1300, source=IdentitySource.IMAGE, resource_digest="sha256:w")
FACTS = ContainerFacts(
    container_id="c1",
    name="x",
    image_id="sha256:w",
    labels={},
    status=ContainerStatus.CREATED,
    exit_code=0,
    oom_killed=False,
    error="",
    created_at=None,
    started_at=None,
    finished_at=None,
    network_mode="none",
    networks=("none",),
    health=HealthStatus.NONE,
    memory_limit_bytes=None,
    tty=False,
)


def _plan(config: DriverConfig) -> LaunchPlan:
    return plan_launch(
        decode_sandbox(sandbox("image:1"), namespace="default", allow_driver_config=False),
        config=config,
        owner=Owner(namespace="default", driver="d1"),
        image=ImageFacts(image_id="sha256:w"),
        identity=IDENTITY,
        supervisor_image_id="sha256:s",
        runtime_volume="r",
    )


def _documents(config: DriverConfig) -> LaunchDocuments:
    launch = launch_authentication(generation="gen-7")
    return build_documents(
        sandbox_id="sb-1",
        launch=launch,
        tls=issue_session_tls(launch.supervisor.session_id),
        identity=IDENTITY,
        workload=FACTS,
        child_environment={},
        host_gateway_ip="127.0.0.1",
        delegation=read_delegation(config),
    )


def test_the_supervisor_is_given_flags_files_and_the_exact_name(tmp_path: Path) -> None:
    anchor = tmp_path / "ca.pem"
    anchor.write_text(issue_session_tls("5f0c7f5e-0000-4000-8000-000000000001").trust_anchor_pem)
    config = _selected({**UNIX, "trust_anchor": str(anchor)})
    plan = _plan(config)
    supervisor = plan.supervisor
    assert supervisor.environment["OPENSHELL_ADMITTED_ISOLATION_BACKEND"] == "acme"
    flags = dict(pairwise(supervisor.command))
    assert flags["--boundary-launch-file"] == "/.openshell/supervisor/boundary-launch.json"
    assert flags["--isolation-backends-file"] == "/.openshell/supervisor/isolation-backends.json"
    assert supervisor.binds == ("/run/acme:/.openshell/isolation-backend:ro",)
    for labels in (supervisor.labels, plan.workload.labels, plan.channel_volume.labels):
        assert labels["openshell.ai/isolation-backend"] == "acme"

    entries = {entry.path: entry for entry in supervisor_entries(_documents(config), gateway_ca=None)}
    for name in ("boundary-launch.json", "isolation-backends.json"):
        assert (entries[name].uid, entries[name].gid, entries[name].mode) == (0, 65534, 0o440)
    launch = BoundaryLaunch.from_json(entries["boundary-launch.json"].content or b"")
    descriptor = RuntimeDescriptor.from_json(entries["runtime-descriptor.json"].content or b"")
    assert (launch.backend_name, launch.sandbox_id, launch.tls.server_name) == ("acme", "sb-1", "backend.acme")
    assert launch.tls.trust_anchor_pem == anchor.read_text()
    for fact in ("generation", "session_id", "workload_identity", "resource_claims", "outer_fence", "host_gateway_ip"):
        assert getattr(launch, fact) == getattr(descriptor, fact), fact
    backends = IsolationBackends.from_json(entries["isolation-backends.json"].content or b"")
    assert [(each.name, each.endpoint) for each in backends.backends] == [
        ("acme", UnixTransport(socket_path="/.openshell/isolation-backend/backend.sock"))
    ]


def test_a_tcp_backend_is_reached_over_the_hosts_network_without_a_mount() -> None:
    config = _selected(TCP)
    assert _plan(config).supervisor.binds == ()
    assert _plan(config).supervisor.network_mode == "host"
    backend = config.delegated_backend
    assert backend is not None
    (seen,) = backend.as_supervisor_sees_it().backends
    assert seen.endpoint == TcpTransport(authority="backend.acme", addresses=tuple(TCP["addresses"]))


def test_the_built_in_backend_is_given_none_of_it() -> None:
    config = _config()
    assert read_delegation(config) is None
    assert "--boundary-launch-file" not in _plan(config).supervisor.command
    assert {entry.path for entry in supervisor_entries(_documents(config), gateway_ca=None)} == {
        "runtime-descriptor.json",
        "auth.json",
    }


@pytest.mark.parametrize("content", [None, "", "no certificate"])
def test_a_trust_anchor_that_cannot_be_used_is_named(tmp_path: Path, content: str | None) -> None:
    anchor = tmp_path / "ca.pem"
    if content is not None:
        anchor.write_text(content)
    with pytest.raises(SupervisorFileError, match=r"isolation_backends\.acme\.trust_anchor"):
        read_delegation(_selected({**UNIX, "trust_anchor": str(anchor)}))


RECORD = SandboxRecord(
    sandbox_id="sb-1",
    name="one",
    workspace="default",
    phase=RecordPhase.ACTIVE,
    changed_at=datetime(2026, 1, 2, tzinfo=UTC),
    isolation_backend="acme",
)


def test_another_selection_is_refused_in_the_contracts_words() -> None:
    check_pin(RECORD, "acme")
    with pytest.raises(PreconditionError) as refused:
        check_pin(RECORD, "openshell-sandbox")
    assert refused.value.message == (
        "sandbox isolation backend 'acme' does not match gateway selection 'openshell-sandbox'; "
        "restore the gateway selection or create a new sandbox"
    )


def test_a_record_without_a_pin_was_admitted_with_the_built_in_backend(tmp_path: Path) -> None:
    store = RecordStore(tmp_path / "ns")
    store.open()
    store.save(RECORD)
    file = tmp_path / "ns" / "sb-1" / RECORD_FILE
    body = json.loads(file.read_bytes())
    assert body["isolation_backend"] == "acme"
    assert "/run/acme" not in file.read_text()
    for added in ("isolation_backend", "runtime_image_id", "runtime_image_reference"):
        del body[added]
    file.write_text(json.dumps(body))
    (old,) = store.load().records
    assert old == replace(RECORD, isolation_backend="")
    check_pin(old, "openshell-sandbox")
    with pytest.raises(PreconditionError):
        check_pin(old, "acme")
