"""Whether a compute driver fits this gateway (compute-driver contract 2.3, 3.1 and 3.2)."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from gateway_embedded.config import DriverPolicy
from gateway_embedded.errors import HandshakeError

PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 0
CONTRACT_CAPABILITY = "openshell.compute.contract"
LAUNCH_AUTHENTICATION_CAPABILITY = "openshell.compute.launch-authentication"
SUPPORTED_CAPABILITIES = (CONTRACT_CAPABILITY, LAUNCH_AUTHENTICATION_CAPABILITY)
IMPLEMENTATION_NAME = "openshell-docker/gateway-embedded"

_ACKNOWLEDGEMENT_PREFIX = "v1:"
_CAPABILITY = re.compile(r"openshell(\.[a-z0-9-]+){2,}", re.ASCII)
_MAX_CAPABILITIES = 128
_MAX_TEXT_BYTES = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """What a driver says about itself as an extension."""

    major: int
    minor: int
    name: str
    version: str
    supported: tuple[str, ...] = ()
    required: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverIdentity:
    """A driver that passed the handshake."""

    driver_name: str
    driver_version: str
    default_image: str
    manages_lifecycle: bool
    reports_runtime_readiness: bool
    peer: Peer
    admission_policy: str
    """The driver's acknowledgement, byte for byte; it must not change while the gateway runs."""
    capabilities: bytes = b""
    """Its resource capabilities, serialised as they came."""


def check_peer(peer: Peer | None) -> Peer:
    """Negotiate the extension protocol.

    Raises:
        HandshakeError: Naming the rule that failed.
    """
    if peer is None:
        raise HandshakeError(
            "the compute driver sent no extension metadata; it speaks an older contract than this gateway"
        )
    for what, text in (("implementation name", peer.name), ("implementation version", peer.version)):
        if not text.strip() or len(text.encode()) > _MAX_TEXT_BYTES or not text.isprintable():
            raise HandshakeError(f"the compute driver's {what} is empty, too long or has control characters")
    if peer.major != PROTOCOL_MAJOR:
        raise HandshakeError(
            f"the compute driver {peer.name} {peer.version} speaks extension protocol {peer.major}.{peer.minor}, "
            f"this gateway speaks {PROTOCOL_MAJOR}.{PROTOCOL_MINOR}"
        )
    _check_capabilities("supported", peer.supported)
    _check_capabilities("required", peer.required)
    if CONTRACT_CAPABILITY not in peer.supported:
        raise HandshakeError(f"the compute driver {peer.name} does not support {CONTRACT_CAPABILITY}")
    missing = sorted(set(peer.required) - set(SUPPORTED_CAPABILITIES))
    if missing:
        raise HandshakeError(
            f"the compute driver {peer.name} requires {', '.join(missing)}, which this gateway does not offer"
        )
    return peer


def check_acknowledgement(text: str, policy: DriverPolicy) -> None:
    """Compare the driver's acknowledgement of the resource admission policy with ours, after parsing.

    Raises:
        HandshakeError: It is missing, malformed or another policy.
    """
    if not text:
        if policy.resource_admission.enabled:
            raise HandshakeError(
                "the compute driver acknowledges no resource admission policy, but this gateway has admission enabled; "
                "start the gateway with --no-resource-admission if the driver is trusted without one"
            )
        return
    if not text.startswith(_ACKNOWLEDGEMENT_PREFIX):
        raise HandshakeError("the compute driver's resource admission policy is not of version v1")
    try:
        theirs = DriverPolicy.model_validate_json(text.removeprefix(_ACKNOWLEDGEMENT_PREFIX), strict=True)
    except (ValidationError, json.JSONDecodeError) as error:
        raise HandshakeError("the compute driver's resource admission policy cannot be read") from error
    differences = _policy_differences(theirs, policy)
    if differences:
        raise HandshakeError(
            "the compute driver and this gateway must be given the same admission settings, but "
            f"{'; and '.join(differences)}; the driver takes them from its configuration under these names"
        )


def _policy_differences(theirs: DriverPolicy, ours: DriverPolicy) -> list[str]:
    """Every setting that differs: its key, both values, and where this gateway takes its own from."""
    compared = (
        ("allow_driver_config", theirs.allow_driver_config, ours.allow_driver_config, "--allow-driver-config"),
        (
            "resource_admission.enabled",
            theirs.resource_admission.enabled,
            ours.resource_admission.enabled,
            "--no-resource-admission",
        ),
        (
            "resource_admission.required_labels",
            theirs.resource_admission.required_labels,
            ours.resource_admission.required_labels,
            "--required-volume-label",
        ),
    )
    return [
        f"{key} is {json.dumps(their_value)} at the driver and {json.dumps(our_value)} here (gateway option {option})"
        for key, their_value, our_value, option in compared
        if their_value != our_value
    ]


def _check_capabilities(kind: str, capabilities: Sequence[str]) -> None:
    if len(capabilities) > _MAX_CAPABILITIES or len(set(capabilities)) != len(capabilities):
        raise HandshakeError(f"the compute driver lists too many or repeated {kind} capabilities")
    for capability in capabilities:
        if len(capability.encode()) > _MAX_TEXT_BYTES or not _CAPABILITY.fullmatch(capability):
            raise HandshakeError(f"the compute driver lists a malformed {kind} capability")
