"""Configuration admission: how a supervisor and its gateway agree on what is started (isolation contract 4.2).

`judge` decides what one look at the configuration calls for, `pause_before_next` what a pass without progress costs;
both are pure. `Admission` carries the decisions out.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

from openshell.status import StatusCode
from openshell.verdicts import Category, Stage, clean_text
from supervisor_reference.errors import GatewayError, PolicyDocumentError, StageError
from supervisor_reference.gateway import AdmissionReport, AdmissionState, ConfigurationSnapshot, Generation
from supervisor_reference.policy import boundary_policy, restrictive_default

if TYPE_CHECKING:
    from openshell.isolation.operations import Policy
    from openshell.wire.sandbox.v1.sandbox_pb2 import SandboxPolicy
    from supervisor_reference.gateway import Gateway, ProviderEnvironment
    from supervisor_reference.timing import Timing

_log = logging.getLogger(__name__)

MAX_UNPRODUCTIVE_PASSES: Final = 5
"""Passes without progress before a startup gives up."""

UNSTABLE: Final = "Startup configuration did not stabilize after 5 attempts"
INVALID_IMAGE_POLICY: Final = "Image policy is invalid; replace the sandbox policy to repair configuration"
NO_POLICY: Final = "Effective policy is unavailable after image discovery"
NOT_ADMITTED: Final = "Effective configuration was rejected by admission"
NOT_LOADABLE: Final = "Policy or provider environment failed runtime validation"
_MAX_GATEWAY_WORDS_BYTES: Final = 512
_WRITE_REFUSED: Final = frozenset({StatusCode.FAILED_PRECONDITION, StatusCode.INVALID_ARGUMENT})


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageDiscovery:
    """What the workload's image says about policy."""

    policy: SandboxPolicy | None = None
    invalid: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Accept:
    """The configuration can be started."""

    policy: SandboxPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """The configuration cannot be started until somebody changes it."""

    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WritePolicy:
    """The sandbox has no policy; this one is to be stored before anything is admitted."""

    policy: SandboxPolicy


Judgement = Accept | Reject | WritePolicy


def judge(snapshot: ConfigurationSnapshot, image: ImageDiscovery, *, written: bool) -> Judgement:
    """Decide what a configuration calls for (table of isolation contract 4.2, in its order).

    Args:
        snapshot: The configuration as fetched.
        image: What image discovery found.
        written: Whether this pass has already stored a policy.
    """
    if snapshot.policy is None:
        if snapshot.error:
            return Reject(error=snapshot.error)
        if image.invalid:
            return Reject(error=INVALID_IMAGE_POLICY)
        if written or snapshot.from_global_policy:
            return Reject(error=NO_POLICY)
        return WritePolicy(policy=restrictive_default() if image.policy is None else image.policy)
    if not snapshot.admitted:
        return Reject(error=snapshot.error or NOT_ADMITTED)
    return Accept(policy=snapshot.policy)


class PassOutcome(Enum):
    """How a pass of the startup loop ended short of admission."""

    REJECTION_RECORDED = "rejection_recorded"
    """The gateway recorded the rejection: progress of a kind, somebody can act on it."""
    REJECTION_OUTDATED = "rejection_outdated"
    """The generation moved while it was rejected: look again at once."""
    CONFLICT = "conflict"
    """The generation moved while it was to be accepted."""


def unproductive_after(outcome: PassOutcome, unproductive: int) -> int:
    """Return the count of passes without progress in a row after a pass."""
    return 0 if outcome is PassOutcome.REJECTION_RECORDED else unproductive + 1


def pause_before_next(outcome: PassOutcome, unproductive: int, timing: Timing) -> float:
    """Return how many seconds to wait before the next pass.

    Args:
        outcome: How the pass ended.
        unproductive: Passes without progress in a row, this one included.
        timing: The pauses.
    """
    if outcome is PassOutcome.REJECTION_RECORDED:
        return timing.rejection_pause_seconds
    if outcome is PassOutcome.REJECTION_OUTDATED:
        return 0.0
    return timing.first_conflict_pause_seconds if unproductive <= 1 else timing.next_conflict_pause_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """The configuration that gateway and supervisor agreed on."""

    generation: Generation
    expected_instance_id: str
    policy: Policy
    """What the boundary is asked to enforce."""
    source: SandboxPolicy
    """The gateway's policy that it was made of."""
    environment: ProviderEnvironment
    written_version: int | None
    """The policy revision that this start wrote; None where the policy is somebody else's."""


class Admission:
    """The startup loop: registers this instance, then repeats passes until a configuration is accepted.

    Args:
        gateway: The gateway.
        timing: Pauses.
    """

    def __init__(self, gateway: Gateway, timing: Timing) -> None:
        self._gateway = gateway
        self._timing = timing
        self._fence = ""
        self._written_versions: set[int] = set()
        self._told: tuple[Generation, str] | None = None

    async def register(self) -> ConfigurationSnapshot:
        """Fetch the configuration once and report this instance as Pending.

        Returns:
            The snapshot whose instance fenced the registration.

        Raises:
            GatewayError: The gateway refused, for example because another instance has registered since.
        """
        snapshot = await self._gateway.fetch_configuration()
        self._fence = snapshot.instance_id
        await self._gateway.report_configuration(
            AdmissionReport(
                state=AdmissionState.PENDING, generation=snapshot.generation, expected_instance_id=self._fence
            )
        )
        return snapshot

    async def admit(self, first: ConfigurationSnapshot, image: ImageDiscovery) -> Admitted:
        """Repeat passes until the gateway has recorded this configuration as accepted.

        Args:
            first: The snapshot that `register` returned.
            image: What image discovery found.

        Raises:
            GatewayError: The gateway refused for good, for example because the repair window has closed.
            StageError: The configuration did not stabilise.
        """
        snapshot: ConfigurationSnapshot | None = first
        unproductive = 0
        while True:
            outcome = await self._pass(snapshot or await self._gateway.fetch_configuration(), image)
            if isinstance(outcome, Admitted):
                return outcome
            snapshot = None
            unproductive = unproductive_after(outcome, unproductive)
            if unproductive >= MAX_UNPRODUCTIVE_PASSES:
                raise StageError(
                    stage=Stage.BUILD, category=Category.CONFIGURATION, public=UNSTABLE, status=StatusCode.ABORTED
                )
            await asyncio.sleep(pause_before_next(outcome, unproductive, self._timing))

    async def _pass(self, snapshot: ConfigurationSnapshot, image: ImageDiscovery) -> Admitted | PassOutcome:
        judgement = judge(snapshot, image, written=False)
        if isinstance(judgement, WritePolicy):
            refusal = await self._write(judgement.policy, snapshot)
            if refusal is not None:
                return await self._reject(snapshot, refusal)
            snapshot = await self._gateway.fetch_configuration()
            judgement = judge(snapshot, image, written=True)
        if isinstance(judgement, Accept):
            return await self._accept(snapshot, judgement.policy)
        return await self._reject(snapshot, judgement.error if isinstance(judgement, Reject) else NO_POLICY)

    async def _write(self, policy: SandboxPolicy, snapshot: ConfigurationSnapshot) -> str | None:
        """Store a policy; returns the text of a rejection where the gateway would not have it."""
        try:
            version = await self._gateway.write_policy(policy, workspace=snapshot.workspace)
        except GatewayError as error:
            if error.status not in _WRITE_REFUSED:
                raise
            words = clean_text(error.detail, max_bytes=_MAX_GATEWAY_WORDS_BYTES) or error.status.name
            return f"Gateway rejected the image policy: {words}"
        if version != snapshot.generation.policy_version:
            self._written_versions.add(version)
        _log.info("stored the sandbox's policy as revision %d", version)
        return None

    async def _accept(self, snapshot: ConfigurationSnapshot, source: SandboxPolicy) -> Admitted | PassOutcome:
        environment = await self._gateway.fetch_provider_environment()
        if environment.revision != snapshot.generation.provider_env_revision:
            return PassOutcome.CONFLICT
        try:
            policy = boundary_policy(source)
        except PolicyDocumentError as error:
            await self._tell_not_loadable(snapshot.generation.policy_version, error)
            return await self._reject(snapshot, NOT_LOADABLE)
        try:
            await self._gateway.report_configuration(
                AdmissionReport(
                    state=AdmissionState.ACCEPTED,
                    generation=snapshot.generation,
                    expected_instance_id=self._fence,
                )
            )
        except GatewayError as error:
            if error.status is not StatusCode.ABORTED:
                raise
            _log.info("the configuration changed while it was being accepted: %s", error.reason)
            return PassOutcome.CONFLICT
        version = snapshot.generation.policy_version
        return Admitted(
            generation=snapshot.generation,
            expected_instance_id=self._fence,
            policy=policy,
            source=source,
            environment=environment,
            written_version=version if version in self._written_versions else None,
        )

    async def _reject(self, snapshot: ConfigurationSnapshot, error: str) -> PassOutcome:
        try:
            await self._gateway.report_configuration(
                AdmissionReport(
                    state=AdmissionState.REJECTED,
                    generation=snapshot.generation,
                    expected_instance_id=self._fence,
                    error=error,
                )
            )
        except GatewayError as failure:
            if failure.status is not StatusCode.ABORTED:
                raise
            return PassOutcome.REJECTION_OUTDATED
        if self._told != (snapshot.generation, error):
            self._told = (snapshot.generation, error)
            _log.error("the configuration was rejected: %s", error)
        return PassOutcome.REJECTION_RECORDED

    async def _tell_not_loadable(self, version: int, error: PolicyDocumentError) -> None:
        _log.error("policy revision %d cannot be loaded: %s", version, error.reason)
        if version == 0:
            return
        try:
            await self._gateway.report_policy_failed(version, error.reason)
        except GatewayError as failure:
            _log.warning("the failed policy revision could not be reported: %s", failure.reason)
