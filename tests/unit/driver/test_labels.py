from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver_docker import labels
from driver_docker.labels import Owner, Role, SandboxLabels

OWNER = Owner(namespace="default", driver="driver-1")
text = st.text(max_size=30)
caller = st.dictionaries(st.sampled_from(sorted(labels.RESERVED)) | text, text)


def made(role: Role = Role.SANDBOX, **changes: object) -> dict[str, str]:
    given_labels: dict[str, object] = {"role": role, "sandbox_id": "id-1", "name": "agent", "workspace": "team"}
    return labels.container_labels(OWNER, **{**given_labels, **changes})  # type: ignore[arg-type]


def test_the_workload_carries_the_contracts_labels() -> None:
    assert made(caller_driver_config_used=True, image_volume_targets=["/data", "/cache"]) == {
        "openshell.ai/managed-by": "openshell",
        "openshell.ai/sandbox-id": "id-1",
        "openshell.ai/sandbox-name": "agent",
        "openshell.ai/sandbox-namespace": "default",
        "openshell.ai/sandbox-workspace": "team",
        "openshell.ai/isolation-backend": "openshell-sandbox",
        "openshell.ai/isolation-role": "sandbox",
        "openshell.ai/caller-driver-config-used": "true",
        "openshell.ai/resource-admission-identities": "{}",
        "openshell.ai/private-image-volume-targets": '["/cache","/data"]',
        "openshell.ai/driver-owner": "driver-1",
    }


def test_a_volume_carries_the_contracts_labels_and_the_owner() -> None:
    assert labels.volume_labels(OWNER, sandbox_id="id-1") == {
        "openshell.ai/managed-by": "openshell",
        "openshell.ai/sandbox-id": "id-1",
        "openshell.ai/sandbox-namespace": "default",
        "openshell.ai/isolation-backend": "openshell-sandbox",
        "openshell.ai/driver-owner": "driver-1",
    }


@given(caller, st.sampled_from(Role))
def test_a_caller_cannot_forge_a_label_that_the_driver_reads(forged: dict[str, str], role: Role) -> None:
    ours = made(role, caller_labels=forged)
    clean = made(role)
    assert {key: value for key, value in ours.items() if key in labels.RESERVED} == clean
    assert all(ours[key] == value for key, value in forged.items() if key not in labels.RESERVED)


@given(st.sampled_from(Role), text.filter(bool), text, text)
def test_what_was_written_is_read_back(role: Role, sandbox_id: str, name: str, workspace: str) -> None:
    written = made(role, sandbox_id=sandbox_id, name=name, workspace=workspace)
    read = labels.read_sandbox(written, OWNER)
    assert read == SandboxLabels(sandbox_id=sandbox_id, name=name, workspace=workspace, role=role)


@pytest.mark.parametrize(
    "other", [Owner(namespace="other", driver="driver-1"), Owner(namespace="default", driver="driver-2")]
)
def test_another_drivers_things_are_not_ours(other: Owner) -> None:
    assert labels.is_owned(made(), OWNER)
    assert not labels.is_owned(made(), other)
    assert labels.read_sandbox(made(), other) is None


@pytest.mark.parametrize("missing", [labels.MANAGED_BY, labels.SANDBOX_ID, labels.ISOLATION_ROLE, labels.DRIVER_OWNER])
def test_incomplete_labels_name_no_sandbox(missing: str) -> None:
    incomplete = made()
    del incomplete[missing]
    assert labels.read_sandbox(incomplete, OWNER) is None


def test_an_unknown_role_names_no_sandbox() -> None:
    assert labels.read_sandbox(made() | {labels.ISOLATION_ROLE: "sidecar"}, OWNER) is None


def test_a_filter_goes_by_id_and_by_name_only_without_one() -> None:
    by_id = labels.sandbox_filter(OWNER, sandbox_id="id-1", name="agent", workspace="team")
    assert by_id[labels.SANDBOX_ID] == "id-1"
    assert labels.SANDBOX_NAME not in by_id
    by_name = labels.sandbox_filter(OWNER, name="agent", workspace="team")
    assert (by_name[labels.SANDBOX_NAME], by_name[labels.SANDBOX_WORKSPACE]) == ("agent", "team")
    assert labels.SANDBOX_ID not in by_name


@given(st.sampled_from(Role), st.none() | st.sampled_from(Role))
def test_a_filter_finds_what_was_labelled_for_it(role: Role, wanted: Role | None) -> None:
    filters = labels.sandbox_filter(OWNER, role=wanted, sandbox_id="id-1")
    found = filters.items() <= made(role).items()
    assert found == (wanted is None or wanted is role)
