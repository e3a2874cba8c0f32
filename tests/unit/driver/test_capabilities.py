"""The handshake and the admission acknowledgement."""

from __future__ import annotations

from dataclasses import replace

import pytest

from driver_docker.capabilities import (
    REQUIRED_CAPABILITIES,
    SUPPORTED_CAPABILITIES,
    Peer,
    admission_acknowledgement,
    check_peer,
)
from driver_docker.config import ResourceAdmission
from driver_docker.errors import PreconditionError
from openshell.status import StatusCode

CONTRACT = "openshell.compute.contract"
GOOD = Peer(
    name="openshell/gateway",
    version="0.1.5",
    protocol_major=1,
    protocol_minor=0,
    supported=(CONTRACT,),
    required=(CONTRACT,),
)


@pytest.mark.parametrize(
    "peer",
    [
        GOOD,
        replace(GOOD, protocol_minor=9),
        replace(GOOD, version="0.0.117-dev.160+g9c41f057c"),
        replace(GOOD, supported=(CONTRACT, "openshell.compute.launch-authentication", "openshell.future.thing")),
        replace(GOOD, required=()),
        replace(GOOD, required=(CONTRACT, "openshell.compute.launch-authentication")),
    ],
)
def test_a_gateway_that_fits_is_accepted(peer: Peer) -> None:
    assert check_peer(peer) is peer


@pytest.mark.parametrize(
    ("peer", "word"),
    [
        (None, "no gateway metadata"),
        (replace(GOOD, protocol_major=2), "2.0"),
        (replace(GOOD, protocol_major=0), "0.0"),
        (replace(GOOD, supported=()), CONTRACT),
        (replace(GOOD, required=("openshell.other.thing",)), "openshell.other.thing"),
        (replace(GOOD, name=" "), "name"),
        (replace(GOOD, version="v\n"), "version"),
        (replace(GOOD, name="n" * 129), "name"),
        (replace(GOOD, supported=(CONTRACT, CONTRACT)), "twice"),
        (replace(GOOD, supported=(CONTRACT, "openshell.two")), "malformed"),
        (replace(GOOD, supported=(CONTRACT, "Openshell.a.b")), "malformed"),
        (replace(GOOD, supported=(CONTRACT, "openshell.a.b_c")), "malformed"),
        (replace(GOOD, supported=(CONTRACT, "openshell.a." + "b" * 128)), "malformed"),
        (replace(GOOD, supported=(CONTRACT, *(f"openshell.a.b{n}" for n in range(128)))), "more than 128"),
    ],
)
def test_a_gateway_that_does_not_fit_is_refused(peer: Peer | None, word: str) -> None:
    with pytest.raises(PreconditionError) as refused:
        check_peer(peer)
    assert word in refused.value.message
    assert refused.value.status is StatusCode.FAILED_PRECONDITION


def test_our_own_capabilities_follow_the_grammar() -> None:
    check_peer(replace(GOOD, supported=SUPPORTED_CAPABILITIES, required=REQUIRED_CAPABILITIES))


def test_the_default_acknowledgement_is_exact() -> None:
    assert admission_acknowledgement(allow_driver_config=False, admission=ResourceAdmission()) == (
        'v1:{"allow_driver_config":false,"resource_admission":{"enabled":true,"required_labels":'
        '{"openshell.ai/sandbox-attachable":"true","openshell.ai/sandbox-attachable-workspace":"${workspace}"}}}'
    )


def test_the_acknowledgement_does_not_depend_on_the_order_of_labels() -> None:
    one = ResourceAdmission(required_labels={"b": "2", "a": "1"})
    two = ResourceAdmission(required_labels={"a": "1", "b": "2"})
    texts = {admission_acknowledgement(allow_driver_config=True, admission=entry) for entry in (one, two)}
    assert len(texts) == 1
    assert '"allow_driver_config":true' in texts.pop()
