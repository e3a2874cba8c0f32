"""Sandbox policies in their three forms: the gateway's message, the image's document, the boundary's request.

Mediated egress is not built, so every policy reaches the boundary with its network blocked, whatever network rules it
holds: that is stricter than the rules, never weaker, and `unmediated_rules` lets the supervisor say so.
"""

from __future__ import annotations

import json
from typing import Final

from openshell.isolation.operations import LandlockRequirement, NetworkMode, Policy
from openshell.isolation.policy_grammar import POLICY_VERSION, is_normal_path
from openshell.wire.sandbox.v1.sandbox_pb2 import FilesystemPolicy, LandlockPolicy, SandboxPolicy
from supervisor_reference.errors import PolicyDocumentError

_LANDLOCK: Final[dict[str, LandlockRequirement]] = {
    "": LandlockRequirement.BEST_EFFORT,
    "best_effort": LandlockRequirement.BEST_EFFORT,
    "hard_requirement": LandlockRequirement.HARD_REQUIREMENT,
}
_DEFAULT_READ_ONLY: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/proc", "/dev/urandom")
_DEFAULT_READ_WRITE: Final = ("/tmp", "/dev/null")  # noqa: S108 - a path of the workload, not of this process


def boundary_policy(policy: SandboxPolicy) -> Policy:
    """Return what the boundary is asked to enforce (isolation contract 3.4, type Policy).

    Raises:
        PolicyDocumentError: A value has no meaning at the boundary.
    """
    if policy.version not in (0, POLICY_VERSION):
        raise PolicyDocumentError(f"policy version {policy.version} is not known, only {POLICY_VERSION}")
    compatibility = policy.landlock.compatibility
    if compatibility not in _LANDLOCK:
        shown = compatibility[:80]
        raise PolicyDocumentError(f"landlock.compatibility {shown!r} is not best_effort or hard_requirement")
    filesystem = policy.filesystem
    for path in (*filesystem.read_only, *filesystem.read_write):
        if not is_normal_path(path):
            raise PolicyDocumentError(f"filesystem path {path[:200]!r} is not absolute and normalised")
    return Policy(
        version=POLICY_VERSION,
        read_only=tuple(filesystem.read_only),
        read_write=tuple(filesystem.read_write),
        include_workdir=filesystem.include_workdir if policy.HasField("filesystem") else True,
        network=NetworkMode.BLOCK,
        landlock=_LANDLOCK[compatibility],
        run_as_user=policy.process.run_as_user or None,
        run_as_group=policy.process.run_as_group or None,
    )


def unmediated_rules(policy: SandboxPolicy) -> tuple[str, ...]:
    """Return the names of the network rules that nothing mediates, sorted."""
    return tuple(sorted(policy.network_policies))


def restrictive_default() -> SandboxPolicy:
    """Return the policy of a sandbox that has none: the workspace, scratch space and the image's programs; no network.

    Landlock is best effort here since nobody chose these paths for the image at hand and some will be missing in it.
    """
    return SandboxPolicy(
        version=1,
        filesystem=FilesystemPolicy(include_workdir=True, read_only=_DEFAULT_READ_ONLY, read_write=_DEFAULT_READ_WRITE),
        landlock=LandlockPolicy(compatibility="best_effort"),
    )


def parse_image_policy(document: str) -> SandboxPolicy:
    """Parse the policy document of an image.

    Only the JSON subset of YAML is read, with the field names of ``openshell.sandbox.v1.SandboxPolicy``; a document in
    any other form is refused rather than read in part.

    Raises:
        PolicyDocumentError: It is not such a document, or holds unknown fields.
    """
    # Few images ship a policy; the parser costs those that do not nothing.
    from google.protobuf import json_format

    try:
        parsed: object = json.loads(document)
    except (ValueError, RecursionError) as error:
        raise PolicyDocumentError("the image's policy is not written in the JSON subset of YAML") from error
    if not isinstance(parsed, dict):
        raise PolicyDocumentError("the image's policy is not an object")
    policy = SandboxPolicy()
    try:
        json_format.ParseDict(parsed, policy)
    except json_format.ParseError as error:
        raise PolicyDocumentError(f"the image's policy cannot be read: {error}") from error
    boundary_policy(policy)
    return policy
