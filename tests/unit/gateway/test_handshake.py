from __future__ import annotations

from dataclasses import replace

import pytest

from gateway_embedded.config import DriverPolicy, ResourceAdmission
from gateway_embedded.errors import HandshakeError
from gateway_embedded.handshake import Peer, check_acknowledgement, check_peer

GOOD = Peer(major=1, minor=0, name="driver", version="1", supported=("openshell.compute.contract",))
DEFAULT = (
    'v1:{"allow_driver_config":false,"resource_admission":{"enabled":true,"required_labels":'
    '{"openshell.ai/sandbox-attachable":"true","openshell.ai/sandbox-attachable-workspace":"${workspace}"}}}'
)


@pytest.mark.parametrize(
    "peer",
    [
        GOOD,
        replace(GOOD, minor=7),
        replace(GOOD, required=("openshell.compute.contract", "openshell.compute.launch-authentication")),
        replace(GOOD, supported=("openshell.compute.contract", "openshell.compute.memory-limit.hard")),
    ],
)
def test_peers_that_fit(peer: Peer) -> None:
    assert check_peer(peer) == peer


@pytest.mark.parametrize(
    ("peer", "text"),
    [
        (None, "older contract"),
        (replace(GOOD, major=2), "extension protocol 2.0"),
        (replace(GOOD, major=0), "extension protocol 0.0"),
        (replace(GOOD, name=" "), "name"),
        (replace(GOOD, name="a\nb"), "name"),
        (replace(GOOD, version=""), "version"),
        (replace(GOOD, version="1" * 129), "version"),
        (replace(GOOD, supported=()), "does not support openshell.compute.contract"),
        (replace(GOOD, required=("openshell.compute.magic",)), "requires openshell.compute.magic"),
        (replace(GOOD, supported=(*GOOD.supported, *GOOD.supported)), "repeated"),
        (replace(GOOD, supported=(*GOOD.supported, "compute.contract")), "malformed supported"),
        (replace(GOOD, supported=(*GOOD.supported, "openshell.Contract.x")), "malformed supported"),
        (replace(GOOD, required=("openshell.two",)), "malformed required"),
        (replace(GOOD, supported=(*GOOD.supported, "openshell." + "x." * 70 + "x")), "malformed supported"),
        (replace(GOOD, supported=(*GOOD.supported, *(f"openshell.a.b{n}" for n in range(128)))), "too many"),
    ],
)
def test_peers_that_do_not_fit(peer: Peer | None, text: str) -> None:
    with pytest.raises(HandshakeError, match=text):
        check_peer(peer)


def test_our_acknowledgement_is_the_contracts_to_the_byte() -> None:
    assert DriverPolicy().acknowledgement() == DEFAULT


def test_acknowledgements_are_compared_after_parsing() -> None:
    check_acknowledgement(DEFAULT, DriverPolicy())
    check_acknowledgement(DEFAULT.replace(":{", ": {").replace(",", ", "), DriverPolicy())
    check_acknowledgement("", DriverPolicy(resource_admission=ResourceAdmission(enabled=False)))


@pytest.mark.parametrize(
    "text",
    [
        "",
        DEFAULT.removeprefix("v1:"),
        DEFAULT.replace("v1", "v2"),
        DEFAULT[:-1],
        DEFAULT.replace("false", "true"),
        DEFAULT.replace("false", '"false"'),
        DEFAULT.replace('"enabled":true', '"enabled":true,"extra":1'),
        DEFAULT.replace("sandbox-attachable-workspace", "other"),
    ],
)
def test_other_acknowledgements_are_refused(text: str) -> None:
    with pytest.raises(HandshakeError):
        check_acknowledgement(text, DriverPolicy())


@pytest.mark.parametrize(
    ("theirs", "said", "unsaid"),
    [
        (
            DriverPolicy(allow_driver_config=True),
            "allow_driver_config is true at the driver and false here (gateway option --allow-driver-config)",
            "resource_admission",
        ),
        (
            DriverPolicy(resource_admission=ResourceAdmission(enabled=False)),
            "resource_admission.enabled is false at the driver and true here (gateway option --no-resource-admission)",
            "required_labels",
        ),
        (
            DriverPolicy(resource_admission=ResourceAdmission(required_labels={"team": "a"})),
            'resource_admission.required_labels is {"team": "a"} at the driver and {',
            "enabled",
        ),
    ],
)
def test_a_refusal_names_what_differs_and_only_that(theirs: DriverPolicy, said: str, unsaid: str) -> None:
    with pytest.raises(HandshakeError) as caught:
        check_acknowledgement(theirs.acknowledgement(), DriverPolicy())
    assert said in caught.value.message
    assert unsaid not in caught.value.message
