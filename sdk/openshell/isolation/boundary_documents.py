"""The two halves of a boundary's description: the runtime's bootstrap and the supervisor's descriptor.

Both carry the same generation, session, identity, claims and fence (compute-driver contract 5.6).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from openshell.isolation.credentials import VerificationKey, check_keys
from openshell.isolation.endpoints import Listener, Transport, TransportTls, read_listener, read_transport
from openshell.isolation.errors import DocumentError
from openshell.isolation.identity import OuterFence, WorkloadIdentity
from openshell.isolation.json_fields import (
    U64_MAX,
    Fields,
    JsonObject,
    check_claims,
    check_generation,
    check_integer,
    check_ipv4,
    check_session_id,
    check_text,
    dump_json,
)

CLAIM_CONTAINER_ID = "docker.container_id"
CLAIM_IMAGE_IDENTITY = "docker.image_identity"
CLAIM_GPU = "openshell.gpu"
CLAIM_EXTRA_GROUPS = "openshell.identity.allow_extra_supplementary_groups"


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryBootstrap:
    """What the sandbox runtime reads at its start (``BoundaryConfig``).

    Attributes:
        boundary_id: the sandbox id.
        generation: the generation.
        session_id: the launch session.
        session_rotation: counts the launch sessions, at least 1. No message of the protocol carries it, so a boundary
            orders supervisors by their tokens' epoch alone.
        auth_epoch: credential epoch, at least 1.
        gateway_id: id of the gateway whose tokens are accepted.
        verification_keys: public keys, at least one.
        listener: where to serve the Sandbox Protocol.
        resource_claims: what the driver bound the boundary to.
        resource_claim_files: claim name to a file that holds its value; empty for Docker.
        workload_identity: who the workload runs as.
        outer_fence: the driver's fence.
        child_env: environment of the workload processes (may hold user secrets, hidden from repr).
    """

    boundary_id: str
    generation: str
    session_id: str
    session_rotation: int
    auth_epoch: int
    gateway_id: str
    verification_keys: tuple[VerificationKey, ...]
    listener: Listener
    resource_claims: Mapping[str, str]
    resource_claim_files: Mapping[str, str] = field(default_factory=dict)
    workload_identity: WorkloadIdentity
    outer_fence: OuterFence
    child_env: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        where = "bootstrap"
        check_text(self.boundary_id, f"{where}.boundary_id", max_bytes=128)
        check_generation(self.generation, f"{where}.generation")
        check_session_id(self.session_id, f"{where}.session_id")
        check_integer(self.session_rotation, f"{where}.session_rotation", minimum=1)
        check_integer(self.auth_epoch, f"{where}.auth_epoch", minimum=1)
        check_text(self.gateway_id, f"{where}.gateway_id", max_bytes=256)
        check_keys(self.verification_keys, f"{where}.verification_keys")
        check_claims(self.resource_claims, f"{where}.resource_claims")
        _check_fence(self.outer_fence, self.generation, where)
        for name, value in self.child_env.items():
            if not name or "=" in name or "\0" in name or "\0" in value:
                raise DocumentError(f"{where}.child_env", "holds a name or value that cannot be an environment entry")

    def to_json(self) -> bytes:
        """The document."""
        return dump_json(
            {
                "boundary_id": self.boundary_id,
                "generation": self.generation,
                "session_id": self.session_id,
                "session_rotation": self.session_rotation,
                "auth_epoch": self.auth_epoch,
                "gateway_id": self.gateway_id,
                "verification_keys": [k.to_object() for k in self.verification_keys],
                "listener": self.listener.to_object(),
                "resource_claims": dict(self.resource_claims),
                "resource_claim_files": dict(self.resource_claim_files),
                "workload_identity": self.workload_identity.to_object(),
                "outer_fence": self.outer_fence.to_object(),
                "child_env": dict(self.child_env),
            }
        )

    @classmethod
    def from_json(cls, data: bytes) -> BoundaryBootstrap:
        """Parse the document.

        Raises:
            DocumentError: naming the member that is wrong.
        """
        fields = Fields.parse(data, "bootstrap")
        path = fields.path("verification_keys")
        keys = tuple(
            VerificationKey.from_fields(Fields(v, f"{path}[{i}]"))
            for i, v in enumerate(fields.array("verification_keys"))
        )
        document = cls(
            boundary_id=fields.text("boundary_id"),
            generation=fields.generation(),
            session_id=fields.session_id(),
            session_rotation=fields.integer("session_rotation", minimum=1, maximum=U64_MAX),
            auth_epoch=fields.integer("auth_epoch", minimum=1, maximum=U64_MAX),
            gateway_id=fields.text("gateway_id"),
            verification_keys=keys,
            listener=read_listener(fields.fields("listener")),
            resource_claims=fields.text_map("resource_claims"),
            resource_claim_files=fields.text_map("resource_claim_files", optional=True),
            workload_identity=WorkloadIdentity.from_fields(fields.fields("workload_identity")),
            outer_fence=OuterFence.from_fields(fields.fields("outer_fence")),
            child_env=fields.text_map("child_env", optional=True),
        )
        fields.finish()
        return document


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeDescriptor:
    """What the supervisor reads about its boundary (``SandboxRuntimeDescriptor``).

    The document is also the ``driver_descriptor`` of OpenBoundary, forwarded unchanged.

    Attributes:
        boundary_id: the sandbox id.
        generation: the generation.
        session_id: the launch session.
        workload_identity: who the workload runs as.
        transport: how to reach the runtime.
        tls: the server name and the trust anchor of this session.
        host_gateway_ip: IPv4 of the gateway's host as the supervisor sees it, or none.
        resource_claims: what the driver bound the boundary to.
        outer_fence: the driver's fence.
    """

    boundary_id: str
    generation: str
    session_id: str
    workload_identity: WorkloadIdentity
    transport: Transport
    tls: TransportTls
    host_gateway_ip: str | None = None
    resource_claims: Mapping[str, str]
    outer_fence: OuterFence

    def __post_init__(self) -> None:
        where = "descriptor"
        check_text(self.boundary_id, f"{where}.boundary_id", max_bytes=128)
        check_generation(self.generation, f"{where}.generation")
        check_session_id(self.session_id, f"{where}.session_id")
        check_ipv4(self.host_gateway_ip, f"{where}.host_gateway_ip")
        check_claims(self.resource_claims, f"{where}.resource_claims")
        _check_fence(self.outer_fence, self.generation, where)

    def to_json(self) -> bytes:
        """The document."""
        return dump_json(
            {
                "boundary_id": self.boundary_id,
                "generation": self.generation,
                "session_id": self.session_id,
                "workload_identity": self.workload_identity.to_object(),
                "transport": self.transport.to_object(),
                "tls": self.tls.to_object(),
                "host_gateway_ip": self.host_gateway_ip,
                "resource_claims": dict(self.resource_claims),
                "outer_fence": self.outer_fence.to_object(),
            }
        )

    @classmethod
    def from_json(cls, data: bytes) -> RuntimeDescriptor:
        """Parse the document.

        Raises:
            DocumentError: naming the member that is wrong.
        """
        fields = Fields.parse(data, "descriptor")
        document = cls(
            boundary_id=fields.text("boundary_id"),
            generation=fields.generation(),
            session_id=fields.session_id(),
            workload_identity=WorkloadIdentity.from_fields(fields.fields("workload_identity")),
            transport=read_transport(fields.fields("transport")),
            tls=TransportTls.from_fields(fields.fields("tls")),
            host_gateway_ip=fields.optional_text("host_gateway_ip"),
            resource_claims=fields.text_map("resource_claims"),
            outer_fence=OuterFence.from_fields(fields.fields("outer_fence")),
        )
        fields.finish()
        return document


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryLaunch:
    """The boundary launch file of a delegated backend (isolation contract 1). It names no endpoint."""

    backend_name: str
    sandbox_id: str
    generation: str
    session_id: str
    workload_identity: WorkloadIdentity
    tls: TransportTls
    resource_claims: Mapping[str, str]
    outer_fence: OuterFence
    host_gateway_ip: str | None = None

    def __post_init__(self) -> None:
        where = "boundary_launch"
        check_text(self.backend_name, f"{where}.backend_name", max_bytes=128)
        check_text(self.sandbox_id, f"{where}.sandbox_id", max_bytes=128)
        check_generation(self.generation, f"{where}.generation")
        check_session_id(self.session_id, f"{where}.session_id")
        check_ipv4(self.host_gateway_ip, f"{where}.host_gateway_ip")
        check_claims(self.resource_claims, f"{where}.resource_claims")
        _check_fence(self.outer_fence, self.generation, where)

    def to_json(self) -> bytes:
        """The document."""
        members: JsonObject = {
            "backend_name": self.backend_name,
            "sandbox_id": self.sandbox_id,
            "generation": self.generation,
            "session_id": self.session_id,
            "workload_identity": self.workload_identity.to_object(),
            "tls": self.tls.to_object(),
            "resource_claims": dict(self.resource_claims),
            "outer_fence": self.outer_fence.to_object(),
        }
        if self.host_gateway_ip is not None:
            members["host_gateway_ip"] = self.host_gateway_ip
        return dump_json(members)

    @classmethod
    def from_json(cls, data: bytes) -> BoundaryLaunch:
        """Parse the document.

        Raises:
            DocumentError: naming the member that is wrong.
        """
        fields = Fields.parse(data, "boundary_launch")
        document = cls(
            backend_name=fields.text("backend_name"),
            sandbox_id=fields.text("sandbox_id"),
            generation=fields.generation(),
            session_id=fields.session_id(),
            workload_identity=WorkloadIdentity.from_fields(fields.fields("workload_identity")),
            tls=TransportTls.from_fields(fields.fields("tls")),
            resource_claims=fields.text_map("resource_claims"),
            outer_fence=OuterFence.from_fields(fields.fields("outer_fence")),
            host_gateway_ip=fields.optional_text("host_gateway_ip"),
        )
        fields.finish()
        return document


def _check_fence(fence: OuterFence, generation: str, where: str) -> None:
    if fence.generation != generation:
        raise DocumentError(f"{where}.outer_fence.generation", "differs from the document's generation")
