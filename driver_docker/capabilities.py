"""The handshake inside `GetCapabilities`: who the peers are, what they require, and the admission acknowledgement."""

from __future__ import annotations

import json
import re
import unicodedata
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from driver_docker.errors import PreconditionError

if TYPE_CHECKING:
    from collections.abc import Collection

    from driver_docker.config import ResourceAdmission
    from driver_docker.engine_objects import EngineInfo

PROTOCOL_MAJOR: Final = 1
PROTOCOL_MINOR: Final = 0
CONTRACT_CAPABILITY: Final = "openshell.compute.contract"
LAUNCH_AUTHENTICATION_CAPABILITY: Final = "openshell.compute.launch-authentication"
HARD_CPU_LIMIT: Final = "openshell.compute.cpu-limit.hard"
HARD_MEMORY_LIMIT: Final = "openshell.compute.memory-limit.hard"
HARD_PIDS_LIMIT: Final = "openshell.compute.pids-limit.hard"
GUARANTEES: Final = {
    HARD_CPU_LIMIT: "a CPU limit is enforced by the kernel for the workload container",
    HARD_MEMORY_LIMIT: "a memory limit is enforced by the kernel for the workload container",
    HARD_PIDS_LIMIT: "every workload container has a hard limit of processes and threads",
    "openshell.compute.reservation.none": "nothing is reserved: CPU and memory requests are refused",
    "openshell.compute.sampled-limit.none": "no limit is kept by sampling: what is not enforced is refused",
    "openshell.compute.network-scope.supervisor-host": "the supervisor shares the network of the engine's host",
}
"""What is finer than `limit_supported`, by namespaced capability. Peers that know none of them lose nothing."""
SUPPORTED_CAPABILITIES: Final = tuple(sorted({CONTRACT_CAPABILITY, LAUNCH_AUTHENTICATION_CAPABILITY, *GUARANTEES}))
REQUIRED_CAPABILITIES: Final = (CONTRACT_CAPABILITY,)
IMPLEMENTATION_NAME: Final = "openshell-docker/driver"

_MAX_CAPABILITIES: Final = 128
_MAX_TEXT_BYTES: Final = 128
_CAPABILITY: Final = re.compile(r"openshell(\.[a-z0-9-]+){2,}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A peer's metadata as it arrived (compute-driver contract 2.2, `PeerMetadata`)."""

    name: str
    version: str
    protocol_major: int
    protocol_minor: int
    supported: tuple[str, ...]
    required: tuple[str, ...]


def offered_capabilities(engine: EngineInfo | None = None) -> tuple[str, ...]:
    """What this driver supports on an engine: a limit that its kernel does not enforce is not promised.

    Args:
        engine: What the engine said when it was connected; `None` stands for one that enforces all limits.
    """
    if engine is None:
        return SUPPORTED_CAPABILITIES
    enforced = {
        HARD_CPU_LIMIT: engine.cpu_limits,
        HARD_MEMORY_LIMIT: engine.memory_limits,
        HARD_PIDS_LIMIT: engine.pids_limits,
    }
    return tuple(name for name in SUPPORTED_CAPABILITIES if enforced.get(name, True))


def check_peer(peer: Peer | None, *, offered: Collection[str] = SUPPORTED_CAPABILITIES) -> Peer:
    """Decide whether this gateway and this driver understand each other (compute-driver contract 2.3 and 3.2).

    Args:
        peer: The gateway's metadata, or `None` when the request had none.
        offered: What this driver supports.

    Returns:
        The same metadata.

    Raises:
        PreconditionError: Missing or malformed metadata, another major version, no contract capability, or a required
            capability that this driver lacks.
    """
    if peer is None:
        raise _refused(
            "the request carries no gateway metadata: this driver needs a gateway of the 0.1 line or newer; "
            "older_gateways = 'serve' admits one of the older generation"
        )
    for what, text in (("implementation name", peer.name), ("implementation version", peer.version)):
        if not text.strip() or len(text.encode()) > _MAX_TEXT_BYTES or any(map(_is_control, text)):
            raise _refused(f"the gateway's {what} must be 1 to {_MAX_TEXT_BYTES} bytes without control characters")
    for what, names in (("supported", peer.supported), ("required", peer.required)):
        _check_capabilities(what, names)
    if peer.protocol_major != PROTOCOL_MAJOR:
        raise _refused(
            f"gateway {peer.name} {peer.version} speaks extension protocol {peer.protocol_major}."
            f"{peer.protocol_minor}, this driver {PROTOCOL_MAJOR}.{PROTOCOL_MINOR}"
        )
    if CONTRACT_CAPABILITY not in peer.supported:
        raise _refused(f"gateway {peer.name} {peer.version} does not support {CONTRACT_CAPABILITY}")
    lacking = sorted(set(peer.required) - set(offered))
    if lacking:
        raise _refused(f"gateway {peer.name} {peer.version} requires {', '.join(lacking)}, which this driver lacks")
    return peer


def _check_capabilities(what: str, names: tuple[str, ...]) -> None:
    if len(names) > _MAX_CAPABILITIES:
        raise _refused(f"the gateway lists more than {_MAX_CAPABILITIES} {what} capabilities")
    if len(set(names)) != len(names):
        raise _refused(f"the gateway lists a {what} capability twice")
    for name in names:
        if len(name.encode()) > _MAX_TEXT_BYTES or not _CAPABILITY.fullmatch(name):
            raise _refused(f"the gateway lists a malformed {what} capability: {name[:_MAX_TEXT_BYTES]}")


def _is_control(char: str) -> bool:
    return unicodedata.category(char) == "Cc"


def _refused(text: str) -> PreconditionError:
    return PreconditionError(text, reason="HandshakeRefused")


def admission_acknowledgement(*, allow_driver_config: bool, admission: ResourceAdmission) -> str:
    """The `resource_admission_policy` of the capabilities: the same bytes for the same configuration, always.

    The gateway compares the string byte by byte before each launch (compute-driver contract 3.2).
    """
    policy = {
        "allow_driver_config": allow_driver_config,
        "resource_admission": {
            "enabled": admission.enabled,
            "required_labels": dict(sorted(admission.required_labels.items())),
        },
    }
    return "v1:" + json.dumps(policy, separators=(",", ":"), ensure_ascii=False)
