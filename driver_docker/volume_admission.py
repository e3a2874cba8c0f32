"""Which of the engine's volumes a sandbox may mount: by the labels that the operator put on the volume itself.

An admitted volume is remembered by its identity in a label of the workload container, and compared with it again right
after the container's creation and before every start: a volume that was removed and made anew under the same name, or
whose labels changed, is another volume (compute-driver contract 5.1, 5.4 and 7.3). The decisions are pure; only
`VolumeAdmission` asks the engine.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from driver_docker import labels
from driver_docker.config import WORKSPACE_PLACEHOLDER
from driver_docker.engine import EngineAbsentError, EngineError
from driver_docker.errors import ProvisioningError
from driver_docker.mounts import VolumeRequest
from driver_docker.plan import RUNTIME_DIR
from driver_docker.verdict import Reason
from driver_docker.workspace import CHANNEL_DIR
from openshell.status import StatusCode

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from driver_docker.config import DriverConfig
    from driver_docker.engine import Engine
    from driver_docker.engine_objects import ContainerFacts, VolumeFacts
    from driver_docker.mounts import MountRequest

CREATED_AT_API: Final = (1, 42)
"""Older engines (before Docker 23) tell when a local volume's content changed last, and call it the creation."""

_OWN_PREFIXES: Final = ("openshell-channel-", "openshell-supervisor-", "openshell-runtime-")
_NETWORK_TYPES: Final = frozenset({"nfs", "nfs4", "cifs", "smb3", "tmpfs"})
_HOST_FLAGS: Final = frozenset({"bind", "rbind", "move", "remount"})


class AdmissionDeniedError(ProvisioningError):
    """A volume is absent, not admitted, or not the one that was admitted."""

    default_reason = Reason.RESOURCE_ADMISSION_DENIED
    default_status = StatusCode.FAILED_PRECONDITION


class AdmissionLookupError(ProvisioningError):
    """A volume's labels could not be read; says nothing about the volume."""

    default_reason = Reason.RESOURCE_ADMISSION_LOOKUP_FAILED
    default_status = StatusCode.UNAVAILABLE
    default_retryable = True


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeIdentity:
    """What makes a volume the same volume."""

    name: str
    driver: str
    options: Mapping[str, str] = field(default_factory=dict)
    created_at: str = ""
    mountpoint: str = ""


def identity_of(facts: VolumeFacts) -> VolumeIdentity:
    """The identity of a volume as the engine tells it now."""
    return VolumeIdentity(
        name=facts.name,
        driver=facts.driver,
        options=dict(facts.options),
        created_at=facts.created_at.isoformat() if facts.created_at is not None else "",
        mountpoint=facts.mountpoint,
    )


def is_same(volume: VolumeFacts, admitted: VolumeIdentity, *, api: tuple[int, int]) -> bool:
    """Whether a volume is the one that was admitted.

    A volume that was made anew is never older, so an earlier time is that of an engine that was updated meanwhile. What
    an older engine tells says nothing at all: there a copy of image content into the volume, or a file that the agent
    makes in it, moves the time. The engine itself removes no volume that a container holds.

    Args:
        volume: The volume as it is now.
        admitted: Its identity when it was admitted.
        api: The engine's API version.
    """
    present = identity_of(volume)
    if replace(present, created_at=admitted.created_at) != admitted:
        return False
    if volume.driver == "local" and api < CREATED_AT_API:
        return True
    # Texts of one form and one zone, which sort like the times they are.
    return not admitted.created_at or present.created_at <= admitted.created_at


def encode_identities(identities: Iterable[VolumeIdentity]) -> str:
    """The value of the label `openshell.ai/resource-admission-identities`."""
    table = {identity.name: asdict(identity) for identity in identities}
    return json.dumps(table, separators=(",", ":"), sort_keys=True)


def decode_identities(text: str) -> tuple[VolumeIdentity, ...]:
    """Read the label back.

    Raises:
        AdmissionDeniedError: It is not what this driver writes.
    """
    try:
        table: dict[str, Any] = json.loads(text)
        found = tuple(VolumeIdentity(**entry) for entry in table.values())
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise AdmissionDeniedError(f"label {labels.RESOURCE_ADMISSION_IDENTITIES} cannot be read") from None
    if {identity.name for identity in found} != set(table):
        raise AdmissionDeniedError(f"label {labels.RESOURCE_ADMISSION_IDENTITIES} contradicts itself")
    return found


def required_labels(configured: Mapping[str, str], *, workspace: str) -> dict[str, str]:
    """The labels a volume must carry, with the sandbox's workspace in place of `${workspace}`."""
    return {key: workspace if value == WORKSPACE_PLACEHOLDER else value for key, value in configured.items()}


def is_bind_backed(facts: VolumeFacts) -> bool:
    """Whether a volume of the `local` driver shows a place of the host, in whichever spelling.

    The local driver hands `type`, `o` and `device` to mount(2), so `o=bind` and its variants, `type=none`, an overlay
    of host folders and a host's block device all end at the host. Only a plain volume, a memory file system and a
    network share do not.
    """
    if facts.driver != "local":
        return False
    options = {key.strip().lower(): value.strip().lower() for key, value in facts.options.items()}
    flags = {flag.strip() for flag in options.get("o", "").split(",")}
    if flags & _HOST_FLAGS:
        return True
    if not options.get("device") and not options.get("type") and not options.get("o"):
        return False
    return options.get("type", "") not in _NETWORK_TYPES


def check_volume(facts: VolumeFacts, *, config: DriverConfig, workspace: str) -> None:
    """Decide whether one volume may be mounted.

    Raises:
        AdmissionDeniedError: It belongs to a sandbox, lacks a label, or is a place of the host where bind mounts are
            not enabled. Values of labels are not told: they are the operator's.
    """
    if facts.name.startswith(_OWN_PREFIXES) or labels.MANAGED_BY in facts.labels:
        raise AdmissionDeniedError(f"volume {facts.name} belongs to a sandbox and cannot be mounted by another")
    if config.resource_admission.enabled:
        wanted = required_labels(config.resource_admission.required_labels, workspace=workspace)
        for key, value in sorted(wanted.items()):
            if key not in facts.labels:
                raise AdmissionDeniedError(f"volume {facts.name} is not admitted: it lacks the label {key}")
            if facts.labels[key] != value:
                raise AdmissionDeniedError(
                    f"volume {facts.name} is not admitted: its label {key} does not have the required value"
                )
    if is_bind_backed(facts) and not config.enable_bind_mounts:
        raise AdmissionDeniedError(
            f"volume {facts.name} is a bind mount of the host, and the operator has not set enable_bind_mounts"
        )


def check_mounted(facts: ContainerFacts, identities: Iterable[VolumeIdentity], *, config: DriverConfig) -> None:
    """Compare what a container has mounted with what was admitted for it.

    Raises:
        AdmissionDeniedError: An admitted volume is missing, or something is mounted that nobody admitted.
    """
    admitted = {identity.name for identity in identities}
    private = _private_targets(facts)
    mounted = set()
    for mount in facts.mounts:
        if mount.kind == "bind":
            if not config.enable_bind_mounts or config.resource_admission.enabled:
                raise AdmissionDeniedError(f"bind mounts are not allowed here any more: {mount.target}")
        elif mount.kind == "volume":
            mounted.add(mount.name)
            own = mount.target in {CHANNEL_DIR, RUNTIME_DIR} and mount.name.startswith(_OWN_PREFIXES)
            if mount.name not in admitted and mount.target not in private and not own:
                raise AdmissionDeniedError(f"volume {mount.name} at {mount.target} was not admitted for this sandbox")
    for name in sorted(admitted - mounted):
        raise AdmissionDeniedError(f"volume {name} was admitted for this sandbox but is not mounted")


def _private_targets(facts: ContainerFacts) -> frozenset[str]:
    try:
        targets = json.loads(facts.labels.get(labels.PRIVATE_IMAGE_VOLUME_TARGETS, "[]"))
        return frozenset(str(target).rstrip("/") or "/" for target in targets)
    except (ValueError, TypeError, RecursionError):
        raise AdmissionDeniedError(f"label {labels.PRIVATE_IMAGE_VOLUME_TARGETS} cannot be read") from None


class VolumeAdmission:
    """Looks volumes up and decides."""

    def __init__(self, engine: Engine, config: DriverConfig) -> None:
        self._engine = engine
        self._config = config

    async def admit(self, mounts: Iterable[MountRequest], *, workspace: str) -> tuple[VolumeIdentity, ...]:
        """Admit every volume among the mounts; nothing is changed.

        Returns:
            The identity of each volume, once.

        Raises:
            AdmissionDeniedError: One is absent or may not be mounted.
            AdmissionLookupError: The engine could not tell.
        """
        names = dict.fromkeys(mount.source for mount in mounts if isinstance(mount, VolumeRequest))
        found = []
        for name in names:
            facts = await self._look_up(name)
            check_volume(facts, config=self._config, workspace=workspace)
            found.append(identity_of(facts))
        return tuple(found)

    async def recheck(self, facts: ContainerFacts) -> None:
        """Decide again about a created workload container; to be called after its creation and before every start.

        Args:
            facts: A fresh inspect of the container; its labels say what was admitted, and for whom.

        Raises:
            AdmissionDeniedError: A volume is gone, replaced, or no longer admitted; the container must not start.
            AdmissionLookupError: The engine could not tell; the start may be tried again.
        """
        if facts.labels.get(labels.CALLER_DRIVER_CONFIG_USED) == "true" and not self._config.allow_driver_config:
            raise AdmissionDeniedError(
                "the sandbox was created with a driver_config, which the operator does not allow any more"
            )
        identities = decode_identities(facts.labels.get(labels.RESOURCE_ADMISSION_IDENTITIES, "{}"))
        check_mounted(facts, identities, config=self._config)
        for identity in identities:
            volume = await self._look_up(identity.name)
            if not is_same(volume, identity, api=self._engine.info.api):
                raise AdmissionDeniedError(
                    f"volume {identity.name} is not the one that was admitted: it was removed and made again"
                )
            check_volume(volume, config=self._config, workspace=facts.labels.get(labels.SANDBOX_WORKSPACE, ""))

    async def _look_up(self, name: str) -> VolumeFacts:
        try:
            return await self._engine.inspect_volume(name)
        except EngineAbsentError:
            raise AdmissionDeniedError(
                f"volume {name} does not exist; the operator creates and labels the volumes that sandboxes may mount"
            ) from None
        except EngineError as error:
            raise AdmissionLookupError(f"volume {name} could not be looked up: {error.message}") from error
