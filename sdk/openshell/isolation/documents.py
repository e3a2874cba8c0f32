"""The documents that driver, supervisor and runtime exchange; standard library only.

Each is a frozen dataclass with ``to_json() -> bytes`` and ``from_json(bytes)``. Unknown members are refused and every
:class:`~openshell.isolation.errors.DocumentError` names the member. Sources: compute-driver contract 5.3 and 5.6,
isolation contract 1 and 2.5.
"""

from __future__ import annotations

from openshell.isolation.boundary_documents import (
    CLAIM_CONTAINER_ID,
    CLAIM_EXTRA_GROUPS,
    CLAIM_GPU,
    CLAIM_IMAGE_IDENTITY,
    BoundaryBootstrap,
    BoundaryLaunch,
    RuntimeDescriptor,
)
from openshell.isolation.credentials import AuthBundle, LaunchAuthentication, VerificationKey
from openshell.isolation.endpoints import (
    Listener,
    ListenerTls,
    TcpListener,
    TcpTransport,
    Transport,
    TransportTls,
    UnixListener,
    UnixTransport,
    VsockListener,
    VsockTransport,
)
from openshell.isolation.errors import DocumentError
from openshell.isolation.identity import (
    ALL_GUARANTEES,
    FenceGuarantee,
    IdentitySource,
    OuterFence,
    WorkloadIdentity,
)
from openshell.isolation.launch_files import (
    BUILT_IN_BACKEND,
    BackendRegistration,
    IsolationBackends,
    MainProcessSpec,
)

__all__ = [
    "ALL_GUARANTEES",
    "BUILT_IN_BACKEND",
    "CLAIM_CONTAINER_ID",
    "CLAIM_EXTRA_GROUPS",
    "CLAIM_GPU",
    "CLAIM_IMAGE_IDENTITY",
    "AuthBundle",
    "BackendRegistration",
    "BoundaryBootstrap",
    "BoundaryLaunch",
    "DocumentError",
    "FenceGuarantee",
    "IdentitySource",
    "IsolationBackends",
    "LaunchAuthentication",
    "Listener",
    "ListenerTls",
    "MainProcessSpec",
    "OuterFence",
    "RuntimeDescriptor",
    "TcpListener",
    "TcpTransport",
    "Transport",
    "TransportTls",
    "UnixListener",
    "UnixTransport",
    "VerificationKey",
    "VsockListener",
    "VsockTransport",
    "WorkloadIdentity",
]
