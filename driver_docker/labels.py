"""Labels on containers and volumes: how the driver finds its own things again, and never touches another's.

Keys and values are the shared key space of compute-driver contract 5.1. `DRIVER_OWNER` is this driver's addition: it
names the driver instance that made a thing, so that two drivers on one engine leave each other alone even where they
were given the same namespace by mistake.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MANAGED_BY: Final = "openshell.ai/managed-by"
MANAGED_BY_OPENSHELL: Final = "openshell"
SANDBOX_ID: Final = "openshell.ai/sandbox-id"
SANDBOX_NAME: Final = "openshell.ai/sandbox-name"
SANDBOX_NAMESPACE: Final = "openshell.ai/sandbox-namespace"
SANDBOX_WORKSPACE: Final = "openshell.ai/sandbox-workspace"
ISOLATION_BACKEND: Final = "openshell.ai/isolation-backend"
BUILTIN_BACKEND: Final = "openshell-sandbox"
ISOLATION_ROLE: Final = "openshell.ai/isolation-role"
CALLER_DRIVER_CONFIG_USED: Final = "openshell.ai/caller-driver-config-used"
RESOURCE_ADMISSION_IDENTITIES: Final = "openshell.ai/resource-admission-identities"
PRIVATE_IMAGE_VOLUME_TARGETS: Final = "openshell.ai/private-image-volume-targets"
DRIVER_OWNER: Final = "openshell.ai/driver-owner"

RESERVED: Final = frozenset(
    {
        MANAGED_BY,
        SANDBOX_ID,
        SANDBOX_NAME,
        SANDBOX_NAMESPACE,
        SANDBOX_WORKSPACE,
        ISOLATION_BACKEND,
        ISOLATION_ROLE,
        CALLER_DRIVER_CONFIG_USED,
        RESOURCE_ADMISSION_IDENTITIES,
        PRIVATE_IMAGE_VOLUME_TARGETS,
        DRIVER_OWNER,
    }
)
"""Every key that the driver reads. A caller's label with one of these keys never reaches a container."""


class Role(StrEnum):
    """What a container of a sandbox is for: the values of `ISOLATION_ROLE`."""

    SANDBOX = "sandbox"
    """The workload container."""
    SUPERVISOR = "supervisor"
    STAGING = "staging"
    IDENTITY = "identity"


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Whose things: one driver instance in one namespace."""

    namespace: str
    """The configured sandbox label; separates gateways that share an engine."""
    driver: str
    """Stable name of this driver instance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLabels:
    """What the labels of a container say about its sandbox."""

    sandbox_id: str
    name: str
    workspace: str
    role: Role


def owner_labels(owner: Owner) -> dict[str, str]:
    """Return the labels of everything that this driver makes; also the narrowest filter that finds all of it."""
    return {
        MANAGED_BY: MANAGED_BY_OPENSHELL,
        SANDBOX_NAMESPACE: owner.namespace,
        DRIVER_OWNER: owner.driver,
    }


def container_labels(
    owner: Owner,
    *,
    role: Role,
    sandbox_id: str,
    name: str,
    workspace: str,
    backend: str = BUILTIN_BACKEND,
    caller_labels: Mapping[str, str] | None = None,
    caller_driver_config_used: bool = False,
    admission_identities_json: str = "{}",
    image_volume_targets: Iterable[str] = (),
) -> dict[str, str]:
    """Return all labels of one container.

    Args:
        owner: Who makes it.
        role: What it is for.
        sandbox_id: The gateway's id of the sandbox.
        name: The gateway's name of the sandbox, unchanged.
        workspace: The gateway's workspace, unchanged.
        backend: Isolation backend that was admitted.
        caller_labels: Labels of the template, for the workload container only; none of `RESERVED` survives.
        caller_driver_config_used: Whether the caller sent a driver configuration.
        admission_identities_json: JSON map of the admitted volumes (contract 5.1).
        image_volume_targets: VOLUME paths of the image.
    """
    labels = {key: value for key, value in (caller_labels or {}).items() if key not in RESERVED}
    labels |= owner_labels(owner)
    labels |= {
        SANDBOX_ID: sandbox_id,
        SANDBOX_NAME: name,
        SANDBOX_WORKSPACE: workspace,
        ISOLATION_BACKEND: backend,
        ISOLATION_ROLE: role.value,
    }
    if role is Role.SANDBOX:
        labels |= {
            CALLER_DRIVER_CONFIG_USED: "true" if caller_driver_config_used else "false",
            RESOURCE_ADMISSION_IDENTITIES: admission_identities_json,
            PRIVATE_IMAGE_VOLUME_TARGETS: json.dumps(sorted(image_volume_targets), separators=(",", ":")),
        }
    return labels


def volume_labels(owner: Owner, *, sandbox_id: str, backend: str = BUILTIN_BACKEND) -> dict[str, str]:
    """Return the labels of a sandbox's channel or supervisor volume. A volume of that name without them is foreign."""
    return owner_labels(owner) | {SANDBOX_ID: sandbox_id, ISOLATION_BACKEND: backend}


def sandbox_filter(
    owner: Owner, *, role: Role | None = Role.SANDBOX, sandbox_id: str = "", name: str = "", workspace: str = ""
) -> dict[str, str]:
    """Return the label filter that finds containers of this driver.

    The id decides where it is given; a name is used only without one, together with the workspace where that is known,
    since two workspaces may hold the same name (compute-driver contract 5.1 and 8.2 point 8).
    """
    labels = owner_labels(owner)
    if role is not None:
        labels[ISOLATION_ROLE] = role.value
    if sandbox_id:
        labels[SANDBOX_ID] = sandbox_id
    elif name:
        labels[SANDBOX_NAME] = name
        if workspace:
            labels[SANDBOX_WORKSPACE] = workspace
    return labels


def is_owned(labels: Mapping[str, str], owner: Owner) -> bool:
    """Whether a thing was made by this driver. Only then may it be changed or removed."""
    return all(labels.get(key) == value for key, value in owner_labels(owner).items())


def read_sandbox(labels: Mapping[str, str], owner: Owner) -> SandboxLabels | None:
    """Read which sandbox a container belongs to; None where it is not this driver's or its labels are incomplete."""
    if not is_owned(labels, owner) or not labels.get(SANDBOX_ID):
        return None
    try:
        role = Role(labels.get(ISOLATION_ROLE, ""))
    except ValueError:
        return None
    return SandboxLabels(
        sandbox_id=labels[SANDBOX_ID],
        name=labels.get(SANDBOX_NAME, ""),
        workspace=labels.get(SANDBOX_WORKSPACE, ""),
        role=role,
    )
