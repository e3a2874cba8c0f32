"""Whether this container can enforce a policy at all; what cannot be enforced is refused, never weakened."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openshell.isolation.errors import DeniedError
from openshell.isolation.operations import LandlockRequirement, NetworkMode, Policy
from openshell.isolation.policy_grammar import POLICY_VERSION
from sandbox_runtime import confinement
from sandbox_runtime.confinement import ConfinementPlan, FilesystemPolicy, PathView, Requirement
from sandbox_runtime.errors import PlatformError, PolicyRefusedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from openshell.isolation.documents import WorkloadIdentity
    from sandbox_runtime.accounts import Accounts


def refuse_unenforceable(policy: Policy, *, identity: WorkloadIdentity, accounts: Accounts) -> None:
    """Refuse a policy that asks for what this container is not.

    Raises:
        DeniedError: With what the policy wants and what there is instead.
    """
    if policy.version != POLICY_VERSION:
        raise DeniedError(f"policy version {policy.version} is not known, only {POLICY_VERSION}")
    _refuse_other_identity("run_as_user", policy.run_as_user, accounts.uid_of, "uid", identity.uid)
    _refuse_other_identity("run_as_group", policy.run_as_group, accounts.gid_of, "gid", identity.gid)
    if policy.network is NetworkMode.ALLOW:
        raise DeniedError("network: allow asks for unmediated egress, and this container has no egress path")


def plan_confinement(policy: Policy, *, workdir: str | None, abi: int, view: PathView) -> ConfinementPlan:
    """The Landlock rules for *policy*.

    Args:
        policy: The attached policy.
        workdir: The main process's working directory when it is known; it becomes writable where the policy says so.
            The root folder never does in this way.
        abi: The kernel's Landlock ABI.
        view: The container's filesystem.

    Raises:
        DeniedError: The policy cannot be enforced as written, or not by this kernel.
    """
    read_write = policy.read_write
    if policy.include_workdir and workdir is not None and workdir != "/":
        read_write = (*read_write, workdir)
    hard = policy.landlock is LandlockRequirement.HARD_REQUIREMENT
    filesystem = FilesystemPolicy(
        read_only=policy.read_only,
        read_write=read_write,
        requirement=Requirement.HARD if hard else Requirement.BEST_EFFORT,
    )
    try:
        return confinement.plan(filesystem, abi=abi, view=view)
    except (PolicyRefusedError, PlatformError) as error:
        raise DeniedError(str(error)) from error


def _refuse_other_identity(
    field: str, selector: str | None, lookup: Callable[[str], int | None], kind: str, actual: int
) -> None:
    if not selector:
        return
    wanted = lookup(selector)
    if wanted is None:
        raise DeniedError(f"{field} {selector!r} is not in the image's accounts; the workload runs as {kind} {actual}")
    if wanted != actual:
        named = "" if selector == str(wanted) else f" ({kind} {wanted})"
        raise DeniedError(f"{field} {selector!r}{named} differs from the workload's identity, {kind} {actual}")
