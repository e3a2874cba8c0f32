"""Documents of a launch and the archives that carry them."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from dataclasses import replace
from datetime import UTC, datetime

from scripted.compute_gateway import SECRET, launch_authentication

from driver_docker.config import Staging
from driver_docker.documents import LaunchDocuments, build_documents, fence_evidence
from driver_docker.engine_objects import ContainerFacts, ContainerStatus, HealthStatus
from driver_docker.staging import build_tar, read_single_file, supervisor_entries, workload_entries
from openshell.isolation.documents import BoundaryBootstrap, IdentitySource, RuntimeDescriptor, WorkloadIdentity
from openshell.isolation.tls import issue_session_tls

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
    created_at=datetime(2026, 1, 1, tzinfo=UTC),
    started_at=None,
    finished_at=None,
    network_mode="none",
    networks=("none",),
    health=HealthStatus.NONE,
    memory_limit_bytes=None,
    tty=False,
)


def build(*, gpus: bool = False) -> tuple[LaunchDocuments, bytes]:
    launch = launch_authentication(generation="gen-7")
    documents = build_documents(
        sandbox_id="sb-1",
        launch=launch,
        tls=issue_session_tls(launch.supervisor.session_id),
        identity=IDENTITY,
        workload=FACTS,
        child_environment={"A": "1"},
        host_gateway_ip="127.0.0.1",
        gpus_attached=gpus,
    )
    return documents, launch.supervisor_json


def test_both_sides_carry_the_same_facts_and_only_the_supervisor_the_tokens() -> None:
    documents, bundle = build()
    bootstrap = BoundaryBootstrap.from_json(documents.bootstrap)
    descriptor = RuntimeDescriptor.from_json(documents.descriptor)
    for name in ("boundary_id", "generation", "session_id", "workload_identity", "resource_claims", "outer_fence"):
        assert getattr(bootstrap, name) == getattr(descriptor, name), name
    assert bootstrap.generation == "gen-7"
    assert bootstrap.resource_claims == {"docker.container_id": "c1", "docker.image_identity": "sha256:w"}
    assert bootstrap.resource_claim_files == {}
    assert documents.auth_bundle == bundle
    assert SECRET in documents.auth_bundle.decode()
    assert SECRET not in (documents.bootstrap + documents.descriptor).decode()
    assert b"PRIVATE KEY" not in documents.descriptor
    assert "PRIVATE KEY" not in repr(documents)


def test_attached_gpus_are_claimed_on_both_sides() -> None:
    documents, _ = build(gpus=True)
    for claims in (
        BoundaryBootstrap.from_json(documents.bootstrap).resource_claims,
        RuntimeDescriptor.from_json(documents.descriptor).resource_claims,
    ):
        assert claims == {
            "docker.container_id": "c1",
            "docker.image_identity": "sha256:w",
            "openshell.gpu": "true",
        }


def test_the_fence_is_bound_to_the_inspected_container() -> None:
    documents, _ = build()
    fence = BoundaryBootstrap.from_json(documents.bootstrap).outer_fence
    evidence = fence_evidence(FACTS)
    assert json.loads(evidence) == {"container_id": "c1", "network_mode": "none", "unexpected_networks": []}
    digest = hashlib.sha256((5).to_bytes(8, "big") + b"gen-7" + evidence).hexdigest()
    assert fence.evidence_digest == digest
    other = fence_evidence(replace(FACTS, networks=("bridge", "none")))
    assert json.loads(other)["unexpected_networks"] == ["bridge"]


def _members(tar: bytes) -> dict[str, tuple[int, int, int, bool]]:
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        return {m.name: (m.uid, m.gid, m.mode, m.isdir()) for m in archive}


def test_the_workloads_archive_has_the_contracts_owners_and_modes() -> None:
    documents, _ = build()
    assert _members(build_tar(workload_entries(documents, IDENTITY, workspace_root="/sandbox"))) == {
        ".openshell": (0, 0, 0o755, True),
        ".openshell/channel": (0, 0, 0o755, True),
        ".openshell/channel/sandbox": (1200, 1300, 0o711, True),
        ".openshell/channel/sandbox/bootstrap.json": (1200, 1300, 0o600, False),
        ".openshell/channel/sandbox/server.crt": (1200, 1300, 0o600, False),
        ".openshell/channel/sandbox/server.key": (1200, 1300, 0o600, False),
        "sandbox": (1200, 1300, 0o700, True),
    }
    assert "sandbox" not in _members(build_tar(workload_entries(documents, IDENTITY, workspace_root="/app")))


def test_the_supervisors_files_cannot_be_changed_by_it() -> None:
    documents, _ = build()
    assert _members(build_tar(supervisor_entries(documents, gateway_ca=b"CA"))) == {
        "runtime-descriptor.json": (0, 65534, 0o440, False),
        "auth.json": (0, 65534, 0o440, False),
        "tls": (0, 65534, 0o550, True),
        "tls/ca.pem": (0, 65534, 0o440, False),
    }
    assert set(_members(build_tar(supervisor_entries(documents, gateway_ca=None)))) == {
        "runtime-descriptor.json",
        "auth.json",
    }


def test_upstreams_staging_gives_the_files_to_the_supervisor() -> None:
    documents, _ = build()
    entries = supervisor_entries(
        documents, gateway_ca=b"CA", proxy_auth=b"x", proxy_ca_bundle=b"PEM", layout=Staging.UPSTREAM
    )
    assert _members(build_tar(entries)) == {
        "runtime-descriptor.json": (65534, 65534, 0o600, False),
        "auth.json": (65534, 65534, 0o600, False),
        "tls": (65534, 65534, 0o700, True),
        "tls/ca.pem": (65534, 65534, 0o600, False),
        "upstream-proxy-auth": (65534, 65534, 0o600, False),
        "upstream-proxy-ca-bundle.pem": (65534, 65534, 0o644, False),
    }


def test_the_proxys_secret_and_certificates_are_staged_beside_them() -> None:
    documents, _ = build()
    entries = supervisor_entries(documents, gateway_ca=None, proxy_auth=b"user:s3cr3t", proxy_ca_bundle=b"PEM")
    found = _members(build_tar(entries))
    assert found["upstream-proxy-auth"] == (0, 65534, 0o440, False)
    assert found["upstream-proxy-ca-bundle.pem"] == (0, 65534, 0o444, False)
    assert "s3cr3t" not in repr(entries)


def test_a_single_file_comes_back_and_a_link_does_not() -> None:
    documents, _ = build()
    entry = supervisor_entries(documents, gateway_ca=None)[0]
    assert read_single_file(build_tar((entry,))) == documents.descriptor
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        link = tarfile.TarInfo("passwd")
        link.type, link.linkname = tarfile.SYMTYPE, "/elsewhere"
        archive.addfile(link)
    assert read_single_file(buffer.getvalue()) is None
