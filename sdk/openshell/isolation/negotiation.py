"""Version and capability negotiation of the Sandbox Protocol (isolation contract 3.1)."""

from __future__ import annotations

import re
from collections.abc import Iterable

from openshell.isolation.errors import NegotiationError
from openshell.wire.extension.v1 import extension_pb2

PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 0
CONTRACT = "openshell.isolation.contract"
SUSPEND_RESUME = "openshell.isolation.suspend-resume"

_CAPABILITY = re.compile(r"openshell(\.[a-z0-9-]+){2,}")
_SHOWN = 8
_SHOWN_BYTES = 96


def our_metadata(name: str, version: str, *, capabilities: tuple[str, ...] = ()) -> extension_pb2.PeerMetadata:
    """What we say about ourselves.

    Args:
        name: implementation name.
        version: implementation version, diagnostic only.
        capabilities: supported capabilities beyond the contract itself.
    """
    return extension_pb2.PeerMetadata(
        protocol_version=extension_pb2.ProtocolVersion(major=PROTOCOL_MAJOR, minor=PROTOCOL_MINOR),
        implementation_name=name,
        implementation_version=version,
        supported_capabilities=[CONTRACT, *capabilities],
        required_capabilities=[CONTRACT],
    )


def negotiate(
    ours: extension_pb2.PeerMetadata, theirs: extension_pb2.PeerMetadata | None, *, peer: str
) -> frozenset[str]:
    """Check a peer's metadata against ours.

    Args:
        ours: our own metadata.
        theirs: the peer's metadata, or none when it sent none.
        peer: what the peer is, for error texts.

    Returns:
        The optional and required capabilities that both support.

    Raises:
        NegotiationError: naming the versions or the missing capabilities.
    """
    if theirs is None or not theirs.HasField("protocol_version"):
        raise _refusal(theirs, peer, f"sent no protocol metadata; isolation protocol {_version(ours)} is needed")
    if theirs.protocol_version.major != ours.protocol_version.major:
        versions = f"{_version(theirs)}, this side {_version(ours)}"
        raise _refusal(theirs, peer, f"speaks isolation protocol {versions}; use matching releases")
    for names in (theirs.supported_capabilities, theirs.required_capabilities):
        if len(set(names)) != len(names) or not all(_CAPABILITY.fullmatch(n) for n in names):
            raise _refusal(theirs, peer, "sent malformed or repeated capabilities")
    if CONTRACT not in theirs.supported_capabilities or CONTRACT not in theirs.required_capabilities:
        raise _refusal(theirs, peer, f"does not both support and require {CONTRACT}")
    if missing := _missing(ours.required_capabilities, theirs.supported_capabilities):
        raise _refusal(theirs, peer, f"lacks required capabilities: {missing}")
    if missing := _missing(theirs.required_capabilities, ours.supported_capabilities):
        raise _refusal(theirs, peer, f"requires capabilities that this side lacks: {missing}")
    return frozenset(ours.supported_capabilities) & frozenset(theirs.supported_capabilities)


def _refusal(theirs: extension_pb2.PeerMetadata | None, peer: str, problem: str) -> NegotiationError:
    named = ""
    if theirs is not None:
        named = f" ({theirs.implementation_name or 'unnamed'} {theirs.implementation_version or 'unknown'})"
    return NegotiationError(f"the {peer}{named} {problem}", public=f"it {problem}")


def _version(metadata: extension_pb2.PeerMetadata) -> str:
    return f"{metadata.protocol_version.major}.{metadata.protocol_version.minor}"


def _missing(needed: Iterable[str], offered: Iterable[str]) -> str:
    names = sorted(set(needed) - set(offered))
    # A name has a grammar but no length, and what is shown here may be public.
    shown = [name if len(name) <= _SHOWN_BYTES else f"{name[:_SHOWN_BYTES]}..." for name in names[:_SHOWN]]
    return ", ".join(shown)
