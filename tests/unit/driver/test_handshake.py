"""Who shakes hands, what is remembered of it, and that the answer never changes."""

from __future__ import annotations

import os
import subprocess
import sys
import unicodedata
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver_docker import encode
from driver_docker.capabilities import (
    CONTRACT_CAPABILITY,
    GUARANTEES,
    HARD_CPU_LIMIT,
    HARD_MEMORY_LIMIT,
    REQUIRED_CAPABILITIES,
    SUPPORTED_CAPABILITIES,
    Peer,
    check_peer,
    offered_capabilities,
)
from driver_docker.config_sources import load_config
from driver_docker.engine_objects import EngineInfo
from driver_docker.errors import STATUS_TEXT_LIMIT_BYTES, PreconditionError
from driver_docker.handshake import Handshake, OlderGateways
from openshell.status import StatusCode

GOOD = Peer(
    name="openshell/gateway",
    version="0.1.5",
    protocol_major=1,
    protocol_minor=0,
    supported=(CONTRACT_CAPABILITY,),
    required=(CONTRACT_CAPABILITY,),
)
SEGMENT = st.text(alphabet="abcdefghijklmnopqrstuvwxyz0123456789-", min_size=1, max_size=12)
CAPABILITY = st.lists(SEGMENT, min_size=2, max_size=5).map(lambda parts: ".".join(["openshell", *parts]))
DEFAULT_ACKNOWLEDGEMENT = (
    'v1:{"allow_driver_config":false,"resource_admission":{"enabled":true,"required_labels":'
    '{"openshell.ai/sandbox-attachable":"true","openshell.ai/sandbox-attachable-workspace":"${workspace}"}}}'
)


def _refused(peer: Peer | None) -> PreconditionError:
    with pytest.raises(PreconditionError) as refused:
        check_peer(peer)
    assert refused.value.status is StatusCode.FAILED_PRECONDITION
    assert 0 < len(refused.value.public_message.encode()) <= STATUS_TEXT_LIMIT_BYTES
    return refused.value


@given(st.lists(CAPABILITY, max_size=100, unique=True), st.integers(0, 2**32 - 1))
def test_every_capability_of_the_grammar_and_every_minor_version_is_accepted(names: list[str], minor: int) -> None:
    offered = tuple(name for name in names if name != CONTRACT_CAPABILITY)
    peer = replace(GOOD, supported=(CONTRACT_CAPABILITY, *offered), protocol_minor=minor)
    assert check_peer(peer) is peer


@given(CAPABILITY, st.sampled_from(["A", "_", ".", "..", " ", "\n", "é", "/"]), st.data())
def test_a_capability_with_a_foreign_character_is_refused(name: str, wrong: str, data: st.DataObject) -> None:
    at = data.draw(st.sampled_from([len("openshell."), len(name)]))
    spoilt = name[:at] + wrong + name[at:]
    if wrong == "." and at == len(name):
        spoilt = name + "."
    _refused(replace(GOOD, supported=(CONTRACT_CAPABILITY, spoilt)))
    _refused(replace(GOOD, required=(CONTRACT_CAPABILITY, spoilt)))


@pytest.mark.parametrize(
    "name", ["", "openshell", "openshell.", "openshell.a", "openshell.a.", "openshellx.a.b", "x.a.b"]
)
def test_a_capability_needs_the_prefix_and_three_segments(name: str) -> None:
    _refused(replace(GOOD, supported=(CONTRACT_CAPABILITY, name)))


def test_bounds_of_a_capability_are_exact() -> None:
    longest = "openshell.a." + "b" * 116
    assert len(longest) == 128
    check_peer(replace(GOOD, supported=(CONTRACT_CAPABILITY, longest)))
    _refused(replace(GOOD, supported=(CONTRACT_CAPABILITY, longest + "b")))
    most = tuple(f"openshell.a.b{number}" for number in range(127))
    check_peer(replace(GOOD, supported=(CONTRACT_CAPABILITY, *most)))
    _refused(replace(GOOD, supported=(CONTRACT_CAPABILITY, *most, "openshell.a.c")))


@given(st.text(min_size=1, max_size=200))
def test_names_and_versions_follow_the_grammar_exactly(text: str) -> None:
    fits = (
        bool(text.strip())
        and len(text.encode("utf-8", "surrogatepass")) <= 128
        and not any(unicodedata.category(char) == "Cc" for char in text)
    )
    for peer in (replace(GOOD, name=text), replace(GOOD, version=text)):
        if fits:
            assert check_peer(peer) is peer
        else:
            _refused(peer)


@given(st.integers(0, 2**32 - 1).filter(lambda major: major != 1))
def test_another_major_version_is_refused_and_both_are_named(major: int) -> None:
    assert f"{major}.7" in _refused(replace(GOOD, protocol_major=major, protocol_minor=7)).message


def test_a_gateway_that_requires_what_is_not_offered_is_told_what() -> None:
    """The registration of backends over the wire is one of these: its field numbers are not established."""
    lacking = "openshell.compute.isolation-backend-registration"
    assert lacking not in SUPPORTED_CAPABILITIES
    assert lacking in _refused(replace(GOOD, required=(CONTRACT_CAPABILITY, lacking))).message


@pytest.mark.parametrize("guarantee", sorted(GUARANTEES))
def test_a_gateway_may_require_a_guarantee(guarantee: str) -> None:
    check_peer(replace(GOOD, required=(CONTRACT_CAPABILITY, guarantee)))


def test_a_guarantee_that_the_engine_cannot_keep_is_neither_offered_nor_may_it_be_required() -> None:
    weak = EngineInfo(
        version="20.10", api_version="1.41", operating_system="linux", architecture="x86_64", memory_limits=False
    )
    assert set(SUPPORTED_CAPABILITIES) - set(offered_capabilities(weak)) == {HARD_MEMORY_LIMIT}
    handshake = Handshake(OlderGateways.REFUSE, offered=offered_capabilities(weak))
    with pytest.raises(PreconditionError, match=HARD_MEMORY_LIMIT):
        handshake.shake(replace(GOOD, required=(CONTRACT_CAPABILITY, HARD_MEMORY_LIMIT)))
    handshake.shake(replace(GOOD, required=(CONTRACT_CAPABILITY, HARD_CPU_LIMIT)))


def test_a_driver_requires_no_more_than_the_contract() -> None:
    """Older gateways of the 0.1 line do not advertise launch credentials (compute-driver contract 2.3)."""
    assert REQUIRED_CAPABILITIES == (CONTRACT_CAPABILITY,)
    assert list(SUPPORTED_CAPABILITIES) == sorted(set(SUPPORTED_CAPABILITIES))


def test_a_gateway_without_metadata_is_refused_unless_the_operator_admits_it() -> None:
    strict = Handshake(OlderGateways.REFUSE)
    with pytest.raises(PreconditionError, match="older_gateways"):
        strict.shake(None)
    assert not strict.older
    lenient = Handshake(OlderGateways.SERVE)
    lenient.shake(None)
    assert lenient.older
    assert lenient.peer is None


def test_the_last_gateway_that_fits_is_remembered() -> None:
    handshake = Handshake(OlderGateways.SERVE)
    handshake.shake(None)
    handshake.shake(GOOD)
    assert (handshake.peer, handshake.older) == (GOOD, False)
    with pytest.raises(PreconditionError):
        handshake.shake(replace(GOOD, protocol_major=2))
    assert (handshake.peer, handshake.older) == (GOOD, False)
    handshake.shake(None)
    assert (handshake.peer, handshake.older) == (None, True)


def _capabilities_of_a_new_process(labels: str, seed: int) -> bytes:
    code = (
        "import sys, tomllib; from driver_docker import encode; from driver_docker.config_sources import load_config;"
        "flags = {'bind_socket': '/run/d.sock', 'resource_admission': {'required_labels': tomllib.loads(sys.argv[1])}};"
        "answer = encode.capabilities(load_config(flags, environment={}));"
        "sys.stdout.buffer.write(answer.SerializeToString(deterministic=True))"
    )
    return subprocess.run(
        [sys.executable, "-c", code, labels],
        env={**os.environ, "PYTHONHASHSEED": str(seed)},
        check=True,
        stdout=subprocess.PIPE,
    ).stdout


def test_the_answer_is_the_same_bytes_in_every_process_whatever_the_order_of_labels() -> None:
    one = _capabilities_of_a_new_process("a='1'\nb='2'\nc='${workspace}'", 1)
    other = _capabilities_of_a_new_process("c='${workspace}'\nb='2'\na='1'", 2)
    assert one == other
    assert b'"required_labels":{"a":"1","b":"2","c":"${workspace}"}' in one


def test_the_default_acknowledgement_is_these_very_bytes() -> None:
    answer = encode.capabilities(load_config({"bind_socket": Path("/run/d.sock")}, environment={}))
    assert answer.resource_admission_policy == DEFAULT_ACKNOWLEDGEMENT
    assert DEFAULT_ACKNOWLEDGEMENT.encode() in answer.SerializeToString()
