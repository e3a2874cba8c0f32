"""Which isolation backend is driven, decided before any credential reaches it (isolation contract 1 and 2.5).

The error texts are the contract's. Its check of the composed setup's name needs no code here: the setup is composed
from the name that was just compared with the admitted one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from openshell.isolation.documents import BUILT_IN_BACKEND, BoundaryLaunch, RuntimeDescriptor
from supervisor_reference.errors import LaunchInputError

if TYPE_CHECKING:
    from openshell.isolation.documents import AuthBundle, IsolationBackends


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryPlan:
    """The one boundary that this supervisor drives."""

    backend_name: str
    """The admitted backend."""
    descriptor: RuntimeDescriptor
    """What is known about the boundary, and how to reach it."""
    driver_descriptor: bytes = field(repr=False)
    """Opaque bytes of the driver, forwarded unchanged."""


def select_boundary(
    *,
    admitted: str,
    sandbox_id: str,
    launch: BoundaryLaunch | RuntimeDescriptor,
    backends: IsolationBackends,
    driver_descriptor: bytes,
) -> BoundaryPlan:
    """Choose the backend that was admitted, or refuse.

    Args:
        admitted: Name that the gateway admitted; independent of any file.
        sandbox_id: The sandbox that was admitted.
        launch: The launch file of a delegated backend, or the built-in backend's own descriptor.
        backends: Backends that the operator registered.
        driver_descriptor: The driver's descriptor as it came.

    Raises:
        LaunchInputError: Names or sandbox do not match, or the backend is not registered.
    """
    if not admitted:
        raise LaunchInputError("runtime descriptor supplied without an admitted isolation backend")
    described = launch.backend_name if isinstance(launch, BoundaryLaunch) else BUILT_IN_BACKEND
    if described != admitted:
        raise LaunchInputError(f'descriptor backend "{described}" does not match admitted backend "{admitted}"')
    descriptor = _delegated(launch, backends) if isinstance(launch, BoundaryLaunch) else launch
    if not sandbox_id or descriptor.boundary_id != sandbox_id:
        raise LaunchInputError("runtime descriptor does not match admitted sandbox")
    return BoundaryPlan(backend_name=described, descriptor=descriptor, driver_descriptor=driver_descriptor)


def check_authentication(plan: BoundaryPlan, auth: AuthBundle) -> None:
    """Check that the tokens are those of this launch.

    Raises:
        LaunchInputError: They belong to another session or generation.
    """
    if auth.session_id != plan.descriptor.session_id:
        raise LaunchInputError("supervisor authentication bundle does not match runtime session")
    if auth.runtime_generation != plan.descriptor.generation:
        raise LaunchInputError("supervisor authentication bundle does not match runtime generation")


def _delegated(launch: BoundaryLaunch, backends: IsolationBackends) -> RuntimeDescriptor:
    """Compose a delegated backend's description: the driver's launch, the operator's endpoint."""
    endpoint = next((one.endpoint for one in backends.backends if one.name == launch.backend_name), None)
    if endpoint is None:
        raise LaunchInputError(f"backend not registered: {launch.backend_name}")
    return RuntimeDescriptor(
        boundary_id=launch.sandbox_id,
        generation=launch.generation,
        session_id=launch.session_id,
        workload_identity=launch.workload_identity,
        transport=endpoint,
        tls=launch.tls,
        host_gateway_ip=launch.host_gateway_ip,
        resource_claims=launch.resource_claims,
        outer_fence=launch.outer_fence,
    )
