"""Policy revisions of a sandbox and the configuration that follows from them (isolation contract 4.5)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import PurePosixPath

from gateway_embedded.admission import EffectiveConfiguration
from gateway_embedded.errors import InvalidRequestError
from gateway_embedded.sandboxes import ConfigurationVersion, PolicyRevision, PolicyState, SandboxRecord
from openshell.wire.sandbox.v1 import sandbox_pb2

NO_PROVIDERS_REVISION = 1
"""Revision of the provider environment of a sandbox without providers: it is empty and never changes."""

STORED_POLICY_INVALID_TEXT = (
    "Stored policy structure or safety validation failed; submit a complete valid replacement policy"
)


def policy_hash(policy: sandbox_pb2.SandboxPolicy) -> str:
    """Lower-case SHA-256 of the policy's deterministic bytes."""
    return hashlib.sha256(policy.SerializeToString(deterministic=True)).hexdigest()


def check_policy(policy: sandbox_pb2.SandboxPolicy) -> None:
    """Refuse a policy that could not mean anything.

    Raises:
        InvalidRequestError: A path is not absolute or climbs, or the workload would run as root.
    """
    for name, paths in (("read_only", policy.filesystem.read_only), ("read_write", policy.filesystem.read_write)):
        for path in paths:
            if not path.startswith("/") or ".." in PurePosixPath(path).parts or "\0" in path:
                raise InvalidRequestError(
                    f"policy path {path!r} must be absolute and without '..'", field=f"policy.filesystem.{name}"
                )
    for name, value in (("run_as_user", policy.process.run_as_user), ("run_as_group", policy.process.run_as_group)):
        if value in ("root", "0"):
            raise InvalidRequestError(
                f"policy would run the workload as {value!r}; name a user without privileges",
                field=f"policy.process.{name}",
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
