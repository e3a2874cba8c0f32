"""Which revision of OpenShell a gateway or an image is, and where that was read. Pure.

A gateway says so in its handshake. An image says so in its label `org.opencontainers.image.version`, which a derivative
keeps (a private CA added, a digest pinned), else in the version-like tag of its reference. A base image's own version
label is inherited too; it is told by the base's name beside it and does not count.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from packaging.version import InvalidVersion, Version

from driver_docker.image_reference import ImageReferenceError, parse_reference

if TYPE_CHECKING:
    from collections.abc import Mapping

    from driver_docker.capabilities import Peer
    from driver_docker.engine_objects import ImageFacts

VERSION_LABEL: Final = "org.opencontainers.image.version"
BASE_NAME_LABEL: Final = "org.opencontainers.image.ref.name"
COMPONENT_LABEL: Final = "openshell.ai/component"
COMPUTE_PROTOCOL_LABEL: Final = "openshell.ai/compute-protocol"
ISOLATION_PROTOCOL_LABEL: Final = "openshell.ai/isolation-protocol"

_BASES: Final = frozenset({"ubuntu", "debian", "alpine", "fedora", "ubi", "rockylinux"})
"""Names under which distributions' images carry their own version label."""
_VERSION_TAG: Final = re.compile(r"v?[0-9]+\.[0-9]+.*|dev\.[0-9]+")
"""A tag that names a version. A date or a number alone, `latest` and `dev` do not."""
_SHORT_DEV: Final = re.compile(r"dev\.([0-9]+)")
_DIGEST: Final = re.compile(r"(sha256:[0-9a-f]{12})[0-9a-f]+")
_MAX_SHOWN: Final = 72


class Component(StrEnum):
    """The members of a triplet, as texts name them."""

    GATEWAY = "gateway"
    SUPERVISOR = "supervisor image"
    RUNTIME = "sandbox runtime image"


class Line(StrEnum):
    """Whose releases a revision belongs to."""

    OPENSHELL = "openshell"
    """Upstream's gateway and images."""
    PROJECT = "openshell-docker"
    """The embedded gateway and the reference images."""
    OTHER = "other"
    """A gateway that is neither; its versions mean nothing to the rules."""


GATEWAY_LINES: Final = {"openshell/gateway": Line.OPENSHELL, "openshell-docker/gateway-embedded": Line.PROJECT}
"""Line of a gateway, by the implementation name of its handshake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """One component's revision."""

    component: Component
    line: Line
    text: str
    """Verbatim, as the component says it; empty when it says nothing."""
    source: str
    """Where it was read, or why there is none."""
    present: bool = True
    """Whether the component could be looked at; `False` for an image that is not on the engine yet."""
    role: str = ""
    """The image's component label; empty where it has none."""
    compute_protocol: str = ""
    isolation_protocol: str = ""

    @property
    def version(self) -> Version | None:
        """The text as a version; `None` when it is none. Never raises on a peer's text."""
        try:
            return Version(self.text)
        except InvalidVersion:
            return None

    @property
    def known(self) -> bool:
        """Whether the text can be compared with another."""
        return self.version is not None or _SHORT_DEV.fullmatch(self.text) is not None

    def same(self, other: Revision) -> bool:
        """Whether two revisions are one.

        Equal texts always are. Releases compare by their public version: what a distributor appends after a plus sign
        does not count. Builds before a release must be the same build: where both name a commit after the plus sign,
        the commits must be equal; a tag cannot hold one. The short tag `dev.N` names build N.
        """
        if self.text == other.text:
            return bool(self.text)
        mine, theirs = self.version, other.version
        if mine is None or theirs is None:
            return _same_short(self.text, theirs) or _same_short(other.text, mine)
        if mine.public != theirs.public:
            return False
        return not mine.is_prerelease or None in (mine.local, theirs.local) or mine.local == theirs.local

    def __str__(self) -> str:
        """The component, its revision verbatim and where that was read."""
        return f"{self.component} {shown(self.text) if self.text else 'of unknown revision'} ({self.source})"


def gateway_revision(peer: Peer | None, *, older: bool = False) -> Revision:
    """The revision of a gateway.

    Args:
        peer: Its metadata, where it introduced itself.
        older: Whether it shook hands as one of the older generation, which has no metadata.
    """
    if peer is None:
        source = "older generation: it sends no metadata" if older else "no gateway has shaken hands yet"
        return Revision(component=Component.GATEWAY, line=Line.OTHER, text="", source=source)
    return Revision(
        component=Component.GATEWAY,
        line=GATEWAY_LINES.get(peer.name, Line.OTHER),
        text=peer.version.strip(),
        source=f"handshake of {shown(peer.name)}",
    )


def image_revision(component: Component, reference: str, facts: ImageFacts | None, *, note: str = "") -> Revision:
    """The revision of an image.

    Args:
        component: Which of the two it is used as.
        reference: How the operator names it.
        facts: The image; `None` while it is not on the engine.
        note: What else to say of where it was read.
    """
    labels: Mapping[str, str] = facts.labels if facts is not None else {}
    text, source = _image_text(reference, labels)
    return Revision(
        component=component,
        line=Line.PROJECT if ISOLATION_PROTOCOL_LABEL in labels else Line.OPENSHELL,
        text=text,
        source=f"{source}{note and f', {note}'}",
        present=facts is not None,
        role=labels.get(COMPONENT_LABEL, ""),
        compute_protocol=labels.get(COMPUTE_PROTOCOL_LABEL, ""),
        isolation_protocol=labels.get(ISOLATION_PROTOCOL_LABEL, ""),
    )


def reference_tag(reference: str) -> str:
    """The tag of a reference: empty for an ID, a digest alone, a reference without one, and what is no reference."""
    try:
        return parse_reference(reference).tag
    except ImageReferenceError:
        return ""


def shown(text: str) -> str:
    """A text of a peer or an operator, cut to what an error text can hold; the end of a reference tells most."""
    text = _DIGEST.sub(r"\1", text)
    return text if len(text) <= _MAX_SHOWN else "..." + text[3 - _MAX_SHOWN :]


def _image_text(reference: str, labels: Mapping[str, str]) -> tuple[str, str]:
    label = labels.get(VERSION_LABEL, "").strip()
    if label and labels.get(BASE_NAME_LABEL, "").rpartition("/")[2] not in _BASES:
        return label, f"label {VERSION_LABEL} of {shown(reference)}"
    tag = reference_tag(reference)
    if _VERSION_TAG.fullmatch(tag):
        return tag, f"tag of {shown(reference)}"
    what = f"tag {tag!r} names no version" if tag else "no tag"
    return "", f"{shown(reference)} has no label {VERSION_LABEL}, and {what}"


def _same_short(text: str, version: Version | None) -> bool:
    match = _SHORT_DEV.fullmatch(text)
    return match is not None and version is not None and version.dev == int(match[1])
