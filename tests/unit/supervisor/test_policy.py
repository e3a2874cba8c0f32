"""Policies on their way to the boundary."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openshell.isolation.operations import LandlockRequirement, NetworkMode
from openshell.wire.sandbox.v1 import sandbox_pb2
from supervisor_reference.errors import PolicyDocumentError
from supervisor_reference.policy import boundary_policy, parse_image_policy, restrictive_default, unmediated_rules


def test_network_rules_never_open_what_nothing_mediates() -> None:
    policy = sandbox_pb2.SandboxPolicy(network_policies={"web": sandbox_pb2.NetworkPolicyRule(name="web")})
    assert boundary_policy(policy).network is NetworkMode.BLOCK
    assert unmediated_rules(policy) == ("web",)


def test_empty_values_mean_none() -> None:
    made = boundary_policy(sandbox_pb2.SandboxPolicy())
    assert (made.version, made.run_as_user, made.run_as_group, made.include_workdir) == (1, None, None, True)
    assert made.landlock is LandlockRequirement.BEST_EFFORT


def test_an_explicit_refusal_of_the_workdir_is_kept() -> None:
    policy = sandbox_pb2.SandboxPolicy(filesystem=sandbox_pb2.FilesystemPolicy(include_workdir=False))
    assert boundary_policy(policy).include_workdir is False


@pytest.mark.parametrize("path", ["relative", "", "/a/../b", "/nul\0", "/usr//lib", "/etc/./x"])
def test_a_path_that_is_not_absolute_and_normal_is_refused(path: str) -> None:
    policy = sandbox_pb2.SandboxPolicy(filesystem=sandbox_pb2.FilesystemPolicy(read_write=[path]))
    with pytest.raises(PolicyDocumentError):
        boundary_policy(policy)


def test_a_version_that_the_boundary_would_refuse_is_refused() -> None:
    with pytest.raises(PolicyDocumentError, match="version 7"):
        boundary_policy(sandbox_pb2.SandboxPolicy(version=7))


def test_the_default_policy_reaches_no_network_and_writes_little() -> None:
    made = boundary_policy(restrictive_default())
    assert made.network is NetworkMode.BLOCK
    assert set(made.read_write) == {"/tmp", "/dev/null"}


def test_reads_an_images_policy() -> None:
    policy = parse_image_policy('{"version": 1, "process": {"run_as_user": "agent"}}')
    assert (policy.version, policy.process.run_as_user) == (1, "agent")


@pytest.mark.parametrize(
    "document",
    [
        "version: 1",
        "[]",
        "",
        '{"surprise": 1}',
        '{"landlock": {"compatibility": "maybe"}}',
        "[" * 100_000,
        "null",
        '{"version": 7}',
    ],
)
def test_an_unreadable_image_policy_is_refused_whole(document: str) -> None:
    with pytest.raises(PolicyDocumentError):
        parse_image_policy(document)


@given(st.text(max_size=200))
def test_any_text_is_a_policy_or_a_typed_error(document: str) -> None:
    try:
        parse_image_policy(document)
    except PolicyDocumentError as error:
        assert error.reason
