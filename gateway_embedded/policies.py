"""Policy revisions of a sandbox and the configuration that follows from them (isolation contract 4.5)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from datetime import datetime

from gateway_embedded.admission import EffectiveConfiguration
from gateway_embedded.errors import InvalidRequestError
from gateway_embedded.sandboxes import ConfigurationVersion, PolicyRevision, PolicyState, SandboxRecord
from openshell.isolation.policy_grammar import POLICY_VERSION, is_normal_path, is_numeric, numeric_id
from openshell.isolation.protocol_types import LandlockRequirement
from openshell.wire.sandbox.v1 import sandbox_pb2

NO_PROVIDERS_REVISION = 1
"""Revision of the provider environment of a sandbox without providers: it is empty and never changes."""

_KNOWN_VERSIONS = (0, POLICY_VERSION)
"""Versions of the policy schema; 0 is one that its author left out."""

_LANDLOCK_COMPATIBILITIES = ("", *LandlockRequirement)
"""What a policy may ask of Landlock; empty is what its author left out."""

STORED_POLICY_INVALID_TEXT = (
    "Stored policy structure or safety validation failed; submit a complete valid replacement policy"
)


def policy_hash(policy: sandbox_pb2.SandboxPolicy) -> str:
    """Lower-case SHA-256 of the policy's deterministic bytes."""
    return hashlib.sha256(policy.SerializeToString(deterministic=True)).hexdigest()


def check_policy(policy: sandbox_pb2.SandboxPolicy) -> None:
    """Refuse a policy that no boundary would take, here, where its author still sees why.

    Raises:
        InvalidRequestError: Its version or what it asks of Landlock is not known, a path is not absolute and
            normalised, or the workload would run as root.
    """
    if policy.version not in _KNOWN_VERSIONS:
        raise InvalidRequestError(
            f"policy version {policy.version} is not known, only {POLICY_VERSION}", field="policy.version"
        )
    compatibility = policy.landlock.compatibility
    if compatibility not in _LANDLOCK_COMPATIBILITIES:
        raise InvalidRequestError(
            f"landlock.compatibility {compatibility[:80]!r} is not {' or '.join(LandlockRequirement)}",
            field="policy.landlock.compatibility",
        )
    for name, paths in (("read_only", policy.filesystem.read_only), ("read_write", policy.filesystem.read_write)):
        for path in paths:
            if not is_normal_path(path):
                raise InvalidRequestError(
                    f"policy path {path[:200]!r} must be absolute, without '.', '..' and empty parts",
                    field=f"policy.filesystem.{name}",
                )
    for name, value in (("run_as_user", policy.process.run_as_user), ("run_as_group", policy.process.run_as_group)):
        number = numeric_id(value)
        if value == "root" or number == 0:
            raise InvalidRequestError(
                f"policy would run the workload as {value[:80]!r}; name a user without privileges",
                field=f"policy.process.{name}",
            )
        if number is None and is_numeric(value):
            raise InvalidRequestError(
                f"{name} {value[:80]!r} is larger than any user or group id", field=f"policy.process.{name}"
            )


def first_revision(sandbox_id: str, policy: sandbox_pb2.SandboxPolicy, *, now: datetime) -> PolicyRevision:
    """Version 1, from the policy of the create request."""
    return PolicyRevision(
        sandbox_id=sandbox_id,
        version=1,
        policy=policy.SerializeToString(deterministic=True),
        policy_hash=policy_hash(policy),
        state=PolicyState.PENDING,
        created_at=now,
    )


def next_revision(
    record: SandboxRecord,
    revisions: Sequence[PolicyRevision],
    policy: sandbox_pb2.SandboxPolicy,
    *,
    provenance: Mapping[str, str],
    now: datetime,
) -> PolicyRevision | None:
    """The revision that a new policy becomes, or nothing when it equals the newest one."""
    digest = policy_hash(policy)
    newest = revisions[-1] if revisions else None
    if newest is not None and newest.policy_hash == digest and dict(newest.provenance) == dict(provenance):
        return None
    return PolicyRevision(
        sandbox_id=record.id,
        version=1 if newest is None else newest.version + 1,
        policy=policy.SerializeToString(deterministic=True),
        policy_hash=digest,
        state=PolicyState.PENDING,
        created_at=now,
        provenance=dict(provenance),
    )


def effective_configuration(record: SandboxRecord, revisions: Sequence[PolicyRevision]) -> EffectiveConfiguration:
    """The configuration that a sandbox should run with: its newest policy and no providers.

    Without any policy nothing is admitted yet: the supervisor first writes back the policy that it found in the image,
    or the restrictive default (isolation contract 4.2).
    """
    newest = revisions[-1] if revisions else None
    version = ConfigurationVersion(
        policy_version=0 if newest is None else newest.version,
        policy_hash="" if newest is None else newest.policy_hash,
        config_revision=record.status.config_revision,
        provider_env_revision=NO_PROVIDERS_REVISION,
    )
    if newest is None:
        return EffectiveConfiguration(version=version, admitted=False)
    try:
        check_policy(sandbox_pb2.SandboxPolicy.FromString(newest.policy))
    except (ValueError, InvalidRequestError):
        return EffectiveConfiguration(
            version=version, admitted=False, error=STORED_POLICY_INVALID_TEXT, buildable=False
        )
    return EffectiveConfiguration(version=version, admitted=True)
