"""The documents and TLS material of one launch (compute-driver contract 5.6)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from driver_docker.plan import CONTROL_SOCKET_PATH, NETWORK_NONE, SERVER_CERTIFICATE_PATH, SERVER_KEY_PATH
from openshell.isolation.documents import (
    CLAIM_CONTAINER_ID,
    CLAIM_GPU,
    CLAIM_IMAGE_IDENTITY,
    BoundaryBootstrap,
    BoundaryLaunch,
    ListenerTls,
    OuterFence,
    RuntimeDescriptor,
    TransportTls,
    UnixListener,
    UnixTransport,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from driver_docker.engine_objects import ContainerFacts
    from driver_docker.isolation_backends import Delegation
    from openshell.isolation.documents import LaunchAuthentication, WorkloadIdentity
    from openshell.isolation.tls import SessionTls


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchDocuments:
    """What the two sides of a boundary read at their start. Nothing of it may be shown."""

    bootstrap: bytes = field(repr=False)
    server_certificate: bytes = field(repr=False)
    server_key: bytes = field(repr=False)
    descriptor: bytes = field(repr=False)
    auth_bundle: bytes = field(repr=False)
    boundary_launch: bytes | None = field(default=None, repr=False)
    """Only for a delegated backend."""
    isolation_backends: bytes | None = field(default=None, repr=False)
    """Only for a delegated backend; never recorded, since endpoints may change between starts."""


def fence_evidence(facts: ContainerFacts) -> bytes:
    """The driver's own evidence that a container has no network (compute-driver contract 5.6)."""
    evidence = {
        "container_id": facts.container_id,
        "network_mode": facts.network_mode,
        "unexpected_networks": unexpected_networks(facts),
    }
    return json.dumps(evidence, separators=(",", ":"), sort_keys=True).encode()


def unexpected_networks(facts: ContainerFacts) -> list[str]:
    """Networks that a workload must not be attached to: every one but the engine's `none`."""
    return [network for network in facts.networks if network != NETWORK_NONE]


def build_documents(
    *,
    sandbox_id: str,
    launch: LaunchAuthentication,
    tls: SessionTls,
    identity: WorkloadIdentity,
    workload: ContainerFacts,
    child_environment: Mapping[str, str],
    host_gateway_ip: str | None,
    gpus_attached: bool = False,
    delegation: Delegation | None = None,
) -> LaunchDocuments:
    """Write bootstrap and descriptor with equal generation, session, identity, claims and fence.

    Args:
        sandbox_id: The boundary's id.
        launch: The gateway's credentials; the supervisor's part passes through verbatim.
        tls: The session's material.
        identity: Who the workload runs as.
        workload: The created container, inspected; the fence is attested from it.
        child_environment: Environment of the workload's processes.
        host_gateway_ip: IPv4 of the gateway's host, where it is one.
        gpus_attached: Whether the workload container was given GPUs.
        delegation: The backend that was admitted, where it is not the built-in one.

    Raises:
        DocumentError: A value does not fit its document.
    """
    generation = launch.supervisor.runtime_generation
    claims = {CLAIM_CONTAINER_ID: workload.container_id, CLAIM_IMAGE_IDENTITY: workload.image_id}
    if gpus_attached:
        claims[CLAIM_GPU] = "true"
    fence = OuterFence.attest(generation=generation, evidence=fence_evidence(workload))
    bootstrap = BoundaryBootstrap(
        boundary_id=sandbox_id,
        generation=generation,
        session_id=launch.supervisor.session_id,
        session_rotation=launch.supervisor.session_rotation,
        auth_epoch=launch.supervisor.auth_epoch,
        gateway_id=launch.gateway_id,
        verification_keys=launch.verification_keys,
        listener=UnixListener(
            socket_path=CONTROL_SOCKET_PATH,
            tls=ListenerTls(certificate_chain_path=SERVER_CERTIFICATE_PATH, private_key_path=SERVER_KEY_PATH),
        ),
        resource_claims=claims,
        workload_identity=identity,
        outer_fence=fence,
        child_env=child_environment,
    )
    descriptor = RuntimeDescriptor(
        boundary_id=sandbox_id,
        generation=generation,
        session_id=launch.supervisor.session_id,
        workload_identity=identity,
        transport=UnixTransport(socket_path=CONTROL_SOCKET_PATH),
        tls=TransportTls(server_name=tls.server_name, trust_anchor_pem=tls.trust_anchor_pem),
        host_gateway_ip=host_gateway_ip,
        resource_claims=claims,
        outer_fence=fence,
    )
    return LaunchDocuments(
        bootstrap=bootstrap.to_json(),
        server_certificate=tls.certificate_chain_pem.encode(),
        server_key=tls.private_key_pem.encode(),
        descriptor=descriptor.to_json(),
        auth_bundle=launch.supervisor_json,
        boundary_launch=None if delegation is None else _boundary_launch(descriptor, delegation).to_json(),
        isolation_backends=None if delegation is None else delegation.backends.to_json(),
    )


def with_delegation(documents: LaunchDocuments, delegation: Delegation | None) -> LaunchDocuments:
    """Recorded documents, with what the supervisor of a delegated backend reads beside them."""
    if delegation is None:
        return documents
    descriptor = RuntimeDescriptor.from_json(documents.descriptor)
    return replace(
        documents,
        boundary_launch=_boundary_launch(descriptor, delegation).to_json(),
        isolation_backends=delegation.backends.to_json(),
    )


def _boundary_launch(descriptor: RuntimeDescriptor, delegation: Delegation) -> BoundaryLaunch:
    """The launch file of a delegated backend: the descriptor's facts, and the backend's own trust."""
    return BoundaryLaunch(
        backend_name=delegation.name,
        sandbox_id=descriptor.boundary_id,
        generation=descriptor.generation,
        session_id=descriptor.session_id,
        workload_identity=descriptor.workload_identity,
        tls=delegation.tls,
        resource_claims=descriptor.resource_claims,
        outer_fence=descriptor.outer_fence,
        host_gateway_ip=descriptor.host_gateway_ip,
    )
