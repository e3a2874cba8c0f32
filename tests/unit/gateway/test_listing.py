from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway_embedded import requests
from gateway_embedded.database import Database
from gateway_embedded.errors import InvalidRequestError
from gateway_embedded.sandboxes import Condition, Launch, Phase, Provisioning, SandboxRecord, SandboxStatus
from gateway_embedded.store import PagePosition, SandboxStore
from gateway_embedded.user_service import read_page
from openshell.wire.datamodel.v1.datamodel_pb2 import AllWorkspaces, WorkspaceSelector
from openshell.wire.v1 import openshell_pb2 as pb

START = datetime(2026, 10, 1, tzinfo=UTC)


def record(index: int, age: int, labels: Mapping[str, str], workspace: str) -> SandboxRecord:
    return SandboxRecord(
        id=str(uuid.UUID(int=index + 1)),
        name=f"s{index}",
        workspace=workspace,
        created_at=START + timedelta(microseconds=age),
        spec=b"",
        launch=Launch(generation="g", session_id="s", session_rotation=1, auth_epoch=1),
        status=SandboxStatus(phase=Phase.READY),
        provisioning=Provisioning(attempt_id="a", preparation_deadline=START),
        labels=labels,
    )


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from(["red", "blue"]), st.sampled_from(["default", "default", "w"])),
        max_size=90,
    ),
    st.integers(1, 7),
    st.sampled_from(["", "team=red", "team!=red", "team", "!team"]),
    st.booleans(),
)
def test_pages_hold_everything_that_matches_once_and_in_order(
    made: list[tuple[int, str, str]], size: int, selector: str, everywhere: bool
) -> None:
    records = [record(index, age, {"team": team}, workspace) for index, (age, team, workspace) in enumerate(made)]
    scope = WorkspaceSelector(all_workspaces=AllWorkspaces()) if everywhere else WorkspaceSelector(workspace="default")
    matches = requests.label_selector(selector)
    expected = [
        item.name
        for item in sorted(records, key=lambda item: (item.created_at, item.id))
        if matches(item.labels) and (everywhere or item.workspace == "default")
    ]

    async def read() -> list[str]:
        database = Database("sqlite://")
        await database.open()
        store = SandboxStore(database)
        for item in records:
            await store.insert(item, None)
        found: list[str] = []
        token = ""
        while True:
            request = pb.ListSandboxesRequest(
                page_size=size, page_token=token, label_selector=selector, workspace_scope=scope
            )
            page, token = await read_page(store, requests.page_of(request))
            assert len(page) <= size
            assert len(page) == size or not token
            found += [item.metadata.name for item in page]
            if not token:
                break
        await database.close()
        return found

    assert asyncio.run(read()) == expected


async def test_a_page_is_cut_by_all_that_it_carries() -> None:
    """Labels, annotations and conditions count as much as specs do."""
    large = record(0, 0, {f"{'p' * 250}/k{number}": "v" * 63 for number in range(256)}, "default")
    words = tuple(Condition(type=f"T{number}", status="True", message="m" * 30_000) for number in range(4))
    large = replace(large, annotations={"a": "x" * 32_000}).with_status(conditions=words)
    database = Database("sqlite://")
    await database.open()
    store = SandboxStore(database)
    for index in range(40):
        await store.insert(replace(large, id=str(uuid.UUID(int=index + 1)), name=f"s{index}"), None)
    request = pb.ListSandboxesRequest(workspace_scope=WorkspaceSelector(workspace="default"))
    names: list[str] = []
    while True:
        page, request.page_token = await read_page(store, requests.page_of(request))
        assert pb.ListSandboxesResponse(sandboxes=page).ByteSize() < 4 * 1024 * 1024
        names += [item.metadata.name for item in page]
        if not request.page_token:
            break
    await database.close()
    assert names == [f"s{index}" for index in range(40)]


@given(st.integers(0, 2**63 - 1), st.uuids())
def test_a_token_leads_back_to_its_position(created: int, sandbox_id: uuid.UUID) -> None:
    request = pb.ListSandboxesRequest(workspace_scope=WorkspaceSelector(workspace="default"))
    end = PagePosition(created, str(sandbox_id))
    request.page_token = requests.page_of(request).token(end)
    assert requests.page_of(request).after == end


@given(st.text(max_size=80))
def test_a_foreign_token_is_refused(token: str) -> None:
    request = pb.ListSandboxesRequest(workspace_scope=WorkspaceSelector(workspace="default"), page_token=token)
    if token:
        with pytest.raises(InvalidRequestError, match="page_token"):
            requests.page_of(request)


def test_a_token_of_another_filter_is_refused() -> None:
    request = pb.ListSandboxesRequest(workspace_scope=WorkspaceSelector(workspace="default"), label_selector="a=b")
    token = requests.page_of(request).token(PagePosition(1, str(uuid.uuid4())))
    request.page_token = token
    requests.page_of(request)
    request.label_selector = "a=c"
    with pytest.raises(InvalidRequestError, match="another filter"):
        requests.page_of(request)


def test_page_sizes() -> None:
    def size(asked: int) -> int:
        scope = WorkspaceSelector(workspace="default")
        return requests.page_of(pb.ListSandboxesRequest(workspace_scope=scope, page_size=asked)).size

    assert [size(0), size(1), size(10**6)] == [requests.DEFAULT_PAGE_SIZE, 1, requests.MAX_PAGE_SIZE]
    with pytest.raises(InvalidRequestError):
        size(-1)


@pytest.mark.parametrize(
    ("selector", "labels", "expected"),
    [
        ("", {}, True),
        ("a=1", {"a": "1"}, True),
        ("a==1", {"a": "1"}, True),
        ("a = 1 , b", {"a": "1", "b": ""}, True),
        ("a=1,b=2", {"a": "1"}, False),
        ("a!=1", {}, True),
        ("!a", {"a": "1"}, False),
        ("openshell.ai/x=1", {"openshell.ai/x": "1"}, True),
    ],
)
def test_label_selectors(selector: str, labels: dict[str, str], expected: bool) -> None:
    assert requests.label_selector(selector)(labels) is expected


@pytest.mark.parametrize("selector", ["=1", "a=1,", "a in (b)", "!a=1", "a=b=c", "-a", ","])
def test_malformed_selectors_are_refused(selector: str) -> None:
    with pytest.raises(InvalidRequestError, match="label_selector"):
        requests.label_selector(selector)
