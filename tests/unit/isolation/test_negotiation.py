"""Version and capability negotiation (isolation contract 3.1)."""

from __future__ import annotations

import re

import pytest

from openshell.isolation.errors import NegotiationError
from openshell.isolation.negotiation import CONTRACT, SUSPEND_RESUME, negotiate, our_metadata
from openshell.status import StatusCode
from openshell.wire.extension.v1.extension_pb2 import PeerMetadata, ProtocolVersion

OURS = our_metadata("openshell-sandbox", "1")


def metadata(
    *,
    version: tuple[int, int] | None = (1, 0),
    supported: tuple[str, ...] = (CONTRACT,),
    required: tuple[str, ...] = (CONTRACT,),
) -> PeerMetadata:
    return PeerMetadata(
        protocol_version=None if version is None else ProtocolVersion(major=version[0], minor=version[1]),
        implementation_name="peer",
        implementation_version="9",
        supported_capabilities=supported,
        required_capabilities=required,
    )


def test_equal_peers_agree() -> None:
    assert negotiate(OURS, our_metadata("other", "2"), peer="backend") == {CONTRACT}


@pytest.mark.parametrize(
    "theirs",
    [
        metadata(version=(1, 7)),
        metadata(supported=(CONTRACT, "openshell.future.thing")),
        metadata(supported=(CONTRACT, SUSPEND_RESUME)),
    ],
)
def test_other_minors_and_unknown_optional_capabilities_are_fine(theirs: PeerMetadata) -> None:
    assert negotiate(OURS, theirs, peer="backend") == {CONTRACT}


@pytest.mark.parametrize(
    ("theirs", "text"),
    [
        (None, "no protocol metadata"),
        (metadata(version=None), "no protocol metadata"),
        (metadata(version=(2, 0)), r"speaks isolation protocol 2\.0, this side 1\.0"),
        (metadata(version=(0, 9)), r"0\.9"),
        (metadata(supported=()), "does not both support and require"),
        (metadata(required=()), "does not both support and require"),
        (metadata(required=(CONTRACT, "openshell.future.thing")), r"requires.*openshell\.future\.thing"),
        (metadata(supported=(CONTRACT, CONTRACT)), "malformed or repeated"),
        (metadata(supported=(CONTRACT, "Openshell.A.B")), "malformed"),
        (metadata(supported=(CONTRACT, "openshell.two")), "malformed"),
        (metadata(supported=(CONTRACT, "openshell.a.b_c")), "malformed"),
    ],
)
def test_incompatible_peers_are_refused_by_name(theirs: PeerMetadata | None, text: str) -> None:
    with pytest.raises(NegotiationError, match=text) as caught:
        negotiate(OURS, theirs, peer="supervisor")
    assert caught.value.status is StatusCode.FAILED_PRECONDITION
    assert "supervisor" in str(caught.value)
    assert re.search(text, caught.value.public)


def test_a_peers_own_name_is_no_public_text_and_a_capability_is_cut() -> None:
    theirs = metadata(required=(CONTRACT, f"openshell.{'a' * 900}.thing"))
    theirs.implementation_name, theirs.implementation_version = "SECRET", "http://evil"
    with pytest.raises(NegotiationError) as caught:
        negotiate(OURS, theirs, peer="backend")
    assert "SECRET http://evil" in caught.value.message
    assert "SECRET" not in caught.value.public
    assert "http" not in caught.value.public
    assert len(caught.value.public) < 200


def test_a_requirement_of_ours_that_they_lack_is_named() -> None:
    ours = our_metadata("x", "1", capabilities=(SUSPEND_RESUME,))
    ours.required_capabilities.append(SUSPEND_RESUME)
    with pytest.raises(NegotiationError, match=r"lacks.*suspend-resume"):
        negotiate(ours, metadata(), peer="backend")
