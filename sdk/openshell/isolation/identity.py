"""Who the workload runs as, and the driver's claim of the outer egress fence (compute-driver contract 5.6)."""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass
from enum import StrEnum

from openshell.isolation.errors import DocumentError
from openshell.isolation.json_fields import U32_MAX, Fields, JsonObject, check_generation


class IdentitySource(StrEnum):
    """Where the workload's uid and gid came from."""

    POLICY = "policy"
    IMAGE = "image"
    DEFAULT = "default"


class FenceGuarantee(StrEnum):
    """What an outer fence guarantees; a fence states all four, in this order."""

    DEFAULT_DENY_EGRESS = "default_deny_egress"
    NO_UNMANAGED_EGRESS_PATH = "no_unmanaged_egress_path"
    REVOCATION_VERIFIED = "revocation_verified"
    CONTROLLER_LOSS_FAILS_CLOSED = "controller_loss_fails_closed"


ALL_GUARANTEES: tuple[FenceGuarantee, ...] = tuple(FenceGuarantee)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadIdentity:
    """The identity of every workload process.

    Attributes:
        uid: user id, never 0.
        gid: group id, never 0.
        supplementary_gids: sorted, unique, without 0 and without ``gid``.
        source: where the identity came from.
        resource_digest: digest of the resource it was resolved from (for Docker the image ID).
    """

    uid: int
    gid: int
    supplementary_gids: tuple[int, ...] = ()
    source: IdentitySource = IdentitySource.DEFAULT
    resource_digest: str

    def __post_init__(self) -> None:
        where = "workload_identity"
        for name, value in (("uid", self.uid), ("gid", self.gid)):
            if not 0 < value <= U32_MAX:
                raise DocumentError(f"{where}.{name}", "must not be root and must fit in 32 bits")
        groups = self.supplementary_gids
        if list(groups) != sorted(set(groups)) or any(not 0 < g <= U32_MAX for g in groups) or self.gid in groups:
            raise DocumentError(f"{where}.supplementary_gids", "must be sorted, unique, without 0 and without gid")
        if not self.resource_digest:
            raise DocumentError(f"{where}.resource_digest", "must not be empty")

    def to_object(self) -> JsonObject:
        """The JSON object."""
        return {
            "uid": self.uid,
            "gid": self.gid,
            "supplementary_gids": list(self.supplementary_gids),
            "source": self.source.value,
            "resource_digest": self.resource_digest,
        }

    @classmethod
    def from_fields(cls, fields: Fields) -> WorkloadIdentity:
        """Read the JSON object.

        Raises:
            DocumentError: naming the member that is wrong.
        """
        source = fields.text("source")
        if source not in set(IdentitySource):
            raise fields.error("source", "must be policy, image or default")
        identity = cls(
            uid=fields.integer("uid", maximum=U32_MAX),
            gid=fields.integer("gid", maximum=U32_MAX),
            supplementary_gids=fields.integers("supplementary_gids", maximum=U32_MAX),
            source=IdentitySource(source),
            resource_digest=fields.text("resource_digest"),
        )
        fields.finish()
        return identity


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterFence:
    """The driver's statement that nothing leaves the workload except through mediation.

    Attributes:
        generation: the generation it was established for.
        established: all four guarantees, in order; fewer are rejected.
        evidence_digest: hex SHA-256 over the generation and the driver's evidence.
    """

    generation: str
    established: tuple[FenceGuarantee, ...] = ALL_GUARANTEES
    evidence_digest: str

    def __post_init__(self) -> None:
        check_generation(self.generation, "outer_fence.generation")
        if self.established != ALL_GUARANTEES:
            raise DocumentError("outer_fence.established", "must list all four guarantees in order")
        if not re.fullmatch(r"[0-9a-f]{64}", self.evidence_digest):
            raise DocumentError("outer_fence.evidence_digest", "must be a lower-case hex SHA-256")

    @classmethod
    def attest(cls, *, generation: str, evidence: bytes) -> OuterFence:
        """State the fence of a generation, bound to validated evidence.

        Args:
            generation: the generation.
            evidence: driver-native evidence bytes, opaque to the peers.
        """
        return cls(generation=generation, evidence_digest=_fence_digest(generation, evidence))

    def attests(self, evidence: bytes) -> bool:
        """Whether this fence was bound to exactly this evidence."""
        return hmac.compare_digest(self.evidence_digest, _fence_digest(self.generation, evidence))

    def to_object(self) -> JsonObject:
        """The JSON object."""
        return {
            "generation": self.generation,
            "established": [g.value for g in self.established],
            "evidence_digest": self.evidence_digest,
        }

    @classmethod
    def from_fields(cls, fields: Fields) -> OuterFence:
        """Read the JSON object.

        Raises:
            DocumentError: naming the member that is wrong, in particular a missing guarantee.
        """
        stated = fields.texts("established")
        if stated != tuple(g.value for g in ALL_GUARANTEES):
            raise fields.error("established", "must list all four guarantees in order")
        fence = cls(generation=fields.generation(), evidence_digest=fields.text("evidence_digest"))
        fields.finish()
        return fence


def _fence_digest(generation: str, evidence: bytes) -> str:
    name = generation.encode("utf-8")
    return hashlib.sha256(len(name).to_bytes(8, "big") + name + evidence).hexdigest()
