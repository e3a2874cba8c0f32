from __future__ import annotations

from collections import Counter

from gateway_embedded.rpc_table import BUILT_RPCS, AuthMode, rpc_table
from openshell.schema import release_descriptors


def test_every_rpc_of_the_published_contract_is_listed_once() -> None:
    service = next(
        service for file in release_descriptors("0.1.5").file for service in file.service if service.name == "OpenShell"
    )
    published = [method.name for method in service.method]
    assert list(rpc_table()) == published
    assert len(published) == 84


def test_who_may_call_what_is_read_from_the_contract() -> None:
    modes = Counter(entry.auth_mode for entry in rpc_table().values())
    assert modes == {
        AuthMode.UNAUTHENTICATED: 1,
        AuthMode.BEARER: 60,
        AuthMode.DUAL: 3,
        AuthMode.OPERATOR: 1,
        AuthMode.SANDBOX: 14,
        AuthMode.PEER: 5,
    }


def test_what_is_not_built_says_why() -> None:
    assert set(rpc_table()) >= BUILT_RPCS
    for name, entry in rpc_table().items():
        assert entry.built is (name in BUILT_RPCS)
        assert (name in entry.refusal) is not entry.built
