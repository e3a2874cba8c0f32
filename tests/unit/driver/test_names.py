from __future__ import annotations

import hashlib
import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from driver_docker.names import (
    channel_volume_name,
    identity_container_name,
    runtime_volume_name,
    staging_container_name,
    supervisor_container_name,
    supervisor_volume_name,
    workload_container_name,
)

VALID = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]+\Z", re.ASCII)
ID = "0f8fad5b-d9cb-469f-a165-70867728950e"

any_part = st.text(max_size=300) | st.text(alphabet="-._ aäA/", max_size=8)
ids = st.uuids(version=4).map(str) | any_part


@pytest.mark.parametrize(
    ("workspace", "name", "expected"),
    [
        ("default", "agent", f"openshell-default--agent-{ID}"),
        ("Team_A", "My.Agent", f"openshell-team_a--my.agent-{ID}"),
        ("default", "-a b/c-", f"openshell-default--a-b-c-{ID}"),
        ("default", "", f"openshell-default---{ID}"),
        ("default", "-", f"openshell-default---{ID}"),
        ("default", "ä", f"openshell-default---{ID}"),
        ("default", "a.", f"openshell-default--a-{ID}"),
        ("", "agent", f"openshell---agent-{ID}"),
        ("w" * 151, "agent", f"openshell-{'w' * 151}---{ID}"),
        ("w" * 150, "agent", f"openshell-{'w' * 150}--a-{ID}"),
        ("default", "n" * 300, f"openshell-default--{'n' * (200 - 19 - 37)}-{ID}"),
        ("default", "n" * 143 + "-.xyz", f"openshell-default--{'n' * 143}-{ID}"),
    ],
)
def test_workload_names_follow_the_contract(workspace: str, name: str, expected: str) -> None:
    assert workload_container_name(workspace=workspace, name=name, sandbox_id=ID) == expected


@given(any_part, any_part, ids)
def test_every_name_is_valid_bounded_and_stable(workspace: str, name: str, sandbox_id: str) -> None:
    workload = workload_container_name(workspace=workspace, name=name, sandbox_id=sandbox_id)
    assert workload == workload_container_name(workspace=workspace, name=name, sandbox_id=sandbox_id)
    assert len(workload) <= 200
    names = [
        workload,
        supervisor_container_name(workload),
        staging_container_name(workload),
        identity_container_name(workload),
    ]
    assert len(set(names)) == 4
    assert all(VALID.match(each) for each in names)


@given(st.tuples(any_part, any_part, ids), st.tuples(any_part, any_part, ids))
def test_two_sandboxes_never_share_a_name(one: tuple[str, str, str], other: tuple[str, str, str]) -> None:
    assume(one[2] != other[2])
    first, second = (workload_container_name(workspace=w, name=n, sandbox_id=i) for w, n, i in (one, other))
    assert first != second
    assert supervisor_container_name(first) != second


@pytest.mark.parametrize(("one", "other"), [("a/b", "a-b"), ("A", "a"), ("ä", "ö"), ("x" * 300, "x" * 301)])
def test_ids_that_are_no_uuids_stay_apart(one: str, other: str) -> None:
    names = {workload_container_name(workspace="w", name="n", sandbox_id=each) for each in (one, other)}
    assert len(names) == 2


def test_an_id_cannot_borrow_from_the_name() -> None:
    assert workload_container_name(workspace="w", name="x-1", sandbox_id="2") != workload_container_name(
        workspace="w", name="x", sandbox_id="1-2"
    )


def test_volume_names_follow_the_contract() -> None:
    digest = hashlib.sha256(b"default\x00" + ID.encode()).hexdigest()[:32]
    assert channel_volume_name(namespace="default", sandbox_id=ID) == f"openshell-channel-{digest}"
    assert supervisor_volume_name(namespace="default", sandbox_id=ID) == f"openshell-supervisor-{digest}"


def test_namespaces_do_not_share_volumes() -> None:
    assert channel_volume_name(namespace="a", sandbox_id=ID) != channel_volume_name(namespace="b", sandbox_id=ID)
    assert runtime_volume_name(namespace="a", image_id="sha256:1") != runtime_volume_name(
        namespace="a", image_id="sha256:2"
    )


@given(any_part, any_part)
def test_volume_names_are_valid_for_the_engine(namespace: str, sandbox_id: str) -> None:
    for name in (
        channel_volume_name(namespace=namespace, sandbox_id=sandbox_id),
        supervisor_volume_name(namespace=namespace, sandbox_id=sandbox_id),
        runtime_volume_name(namespace=namespace, image_id=sandbox_id),
    ):
        assert VALID.match(name)
