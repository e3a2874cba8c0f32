"""Which gateways and images fit together, and what is said of those that do not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devtools.images.build import project_version
from devtools.images.layout import Role
from devtools.images.layout import labels as image_labels
from driver_docker.capabilities import CONTRACT_CAPABILITY, Peer
from driver_docker.compatibility import RULES, Outcome, judge
from driver_docker.engine_objects import ImageFacts
from driver_docker.errors import STATUS_TEXT_LIMIT_BYTES, public_text
from driver_docker.revisions import (
    GATEWAY_LINES,
    VERSION_LABEL,
    Component,
    Line,
    Revision,
    gateway_revision,
    image_revision,
    reference_tag,
)
from gateway_embedded.handshake import IMPLEMENTATION_NAME as EMBEDDED_GATEWAY
from gateway_embedded.version import own_version as embedded_gateway_version

if TYPE_CHECKING:
    from collections.abc import Mapping

UPSTREAM = "openshell/gateway"
REPOSITORY = "ghcr.io/nvidia/openshell"
DIGEST = "sha256:" + "0123456789abcdef" * 4


def _gateway(version: str | None, name: str = UPSTREAM) -> Revision:
    if version is None:
        return gateway_revision(None)
    return gateway_revision(
        Peer(
            name=name,
            version=version,
            protocol_major=1,
            protocol_minor=0,
            supported=(CONTRACT_CAPABILITY,),
            required=(CONTRACT_CAPABILITY,),
        )
    )


def _image(component: Component, reference: str, labels: Mapping[str, str] | None = None) -> Revision:
    return image_revision(component, reference, ImageFacts(image_id=DIGEST, labels=labels or {}))


def _upstream(supervisor: str, runtime: str) -> tuple[Revision, Revision]:
    return (
        _image(Component.SUPERVISOR, f"{REPOSITORY}/supervisor:{supervisor}"),
        _image(Component.RUNTIME, f"{REPOSITORY}/sandbox:{runtime}"),
    )


def _ours(version: str = "") -> tuple[Revision, Revision]:
    version = version or project_version()
    return (
        _image(Component.SUPERVISOR, "openshell-local/supervisor:7f03", image_labels(Role.SUPERVISOR, version, "c1")),
        _image(Component.RUNTIME, "openshell-local/runtime:64a5", image_labels(Role.RUNTIME, version, "c2")),
    )


SUPPORTED, UNSUPPORTED = Outcome.SUPPORTED, Outcome.UNSUPPORTED
UNKNOWN_IMAGE, UNKNOWN_GATEWAY = Outcome.UNKNOWN_IMAGE, Outcome.UNKNOWN_GATEWAY


@pytest.mark.parametrize(
    ("gateway", "supervisor", "runtime", "outcome"),
    [
        ("0.1.5", "0.1.5", "0.1.5", SUPPORTED),
        ("0.1.5", "v0.1.5", "0.1.5", SUPPORTED),
        ("0.1.5+corp.7", "0.1.5", "0.1.5", SUPPORTED),
        ("0.1.5", "0.1.4", "0.1.4", UNSUPPORTED),
        ("0.1.5", "0.1.5", "0.1.4", UNSUPPORTED),
        ("0.1.5", "0.1.4", "0.1.5", UNSUPPORTED),
        ("0.1.5", "0.1.5-1", "0.1.5-1", UNSUPPORTED),
        ("0.1.6", "0.1.6-rc.1", "0.1.6-rc.1", UNSUPPORTED),
        ("0.0.117-dev.160", "0.0.117-dev.160", "0.0.117-dev.160", SUPPORTED),
        ("0.0.117-dev.160+g9c41f057c", "0.0.117-dev.160", "0.0.117-dev.160", SUPPORTED),
        ("0.0.117-dev.160", "0.0.117-dev.158", "0.0.117-dev.158", UNSUPPORTED),
        ("0.0.117-dev.160", "dev.158", "dev.158", UNSUPPORTED),
        ("0.0.117-dev.160", "dev.160", "dev.160", SUPPORTED),
        ("0.0.117", "0.0.117-dev.160", "0.0.117-dev.160", UNSUPPORTED),
        ("m-dev", "0.1.5", "0.1.5", UNKNOWN_GATEWAY),
        ("m-dev", "0.1.5", "0.1.4", UNSUPPORTED),
        ("0.1.5", "latest", "latest", UNKNOWN_IMAGE),
        ("0.1.5", "dev", "0.1.5", UNKNOWN_IMAGE),
        ("0.1.5", "0.1.5", "20260901", UNKNOWN_IMAGE),
        ("0.1.5", "0.1.5-ca1", "0.1.5-ca1", UNKNOWN_IMAGE),
        (None, "0.1.5", "0.1.5", UNKNOWN_GATEWAY),
        (None, "0.1.5", "0.1.4", UNSUPPORTED),
        (None, "latest", "0.1.4", UNKNOWN_IMAGE),
    ],
)
def test_upstreams_triplets_fit_when_they_are_of_one_revision(
    gateway: str | None, supervisor: str, runtime: str, outcome: Outcome
) -> None:
    assert judge(_gateway(gateway), *_upstream(supervisor, runtime)).outcome is outcome


def test_dev_builds_of_one_number_from_two_commits_do_not_fit() -> None:
    gateway = _gateway("0.0.117-dev.160+g9c41f057c")
    for commit, outcome in (("g9c41f057c", SUPPORTED), ("g000000000", UNSUPPORTED)):
        label = {VERSION_LABEL: f"0.0.117-dev.160+{commit}"}
        images = (_image(Component.SUPERVISOR, "a/b:dev", label), _image(Component.RUNTIME, "a/c:dev", label))
        assert judge(gateway, *images).outcome is outcome


def test_our_own_triplet_fits_as_it_is_built() -> None:
    """The gateway says what it says in its handshake, the images carry what the image builder puts on them."""
    assert GATEWAY_LINES[EMBEDDED_GATEWAY] is Line.PROJECT
    assert embedded_gateway_version() == project_version()
    finding = judge(_gateway(embedded_gateway_version(), EMBEDDED_GATEWAY), *_ours())
    assert (finding.outcome, finding.message) == (SUPPORTED, "")


@pytest.mark.parametrize(
    ("gateway", "name", "images", "outcome"),
    [
        ("0.1.5", UPSTREAM, _ours(), SUPPORTED),
        ("0.2.0", UPSTREAM, _ours(), UNSUPPORTED),
        ("0.0.117", UPSTREAM, _ours(), UNSUPPORTED),
        ("0.1.6-rc.1", UPSTREAM, _ours(), UNSUPPORTED),
        ("0.9.9", EMBEDDED_GATEWAY, _ours(), UNSUPPORTED),
        (project_version(), EMBEDDED_GATEWAY, _upstream("0.1.5", "0.1.5"), SUPPORTED),
        (project_version(), EMBEDDED_GATEWAY, _upstream("0.1.5", "0.1.4"), UNSUPPORTED),
        (project_version(), EMBEDDED_GATEWAY, _upstream("0.2.0", "0.2.0"), UNSUPPORTED),
        ("7.0", "acme/gateway", _upstream("0.1.5", "0.1.5"), UNKNOWN_GATEWAY),
    ],
)
def test_lines_are_mixed_only_as_the_table_says(
    gateway: str, name: str, images: tuple[Revision, Revision], outcome: Outcome
) -> None:
    assert judge(_gateway(gateway, name), *images).outcome is outcome


def test_every_rule_of_the_table_accepts_something() -> None:
    assert {(rule.gateway, rule.images) for rule in RULES} == {
        (Line.OPENSHELL, Line.OPENSHELL),
        (Line.PROJECT, Line.PROJECT),
        (Line.OPENSHELL, Line.PROJECT),
        (Line.PROJECT, Line.OPENSHELL),
    }
    assert all(rule.why for rule in RULES)


def test_a_label_counts_more_than_a_tag() -> None:
    """A derivative, for example with a private CA added, keeps the labels of what it was made from."""
    kept = {VERSION_LABEL: "0.1.5"}
    images = (
        _image(Component.SUPERVISOR, "registry.corp:5000/openshell-supervisor:ca-3", kept),
        _image(Component.RUNTIME, "registry.corp:5000/openshell-sandbox:2.0", kept),
    )
    assert judge(_gateway("0.1.5"), *images).outcome is SUPPORTED
    finding = judge(_gateway("0.1.4"), *images)
    assert finding.outcome is UNSUPPORTED
    assert f"0.1.5 (label {VERSION_LABEL} of registry.corp:5000/openshell-sandbox:2.0)" in finding.message


def test_a_base_images_own_version_is_not_taken_for_ours() -> None:
    base = {VERSION_LABEL: "24.04", "org.opencontainers.image.ref.name": "ubuntu"}
    images = (
        _image(Component.SUPERVISOR, f"{REPOSITORY}/supervisor:0.1.5", base),
        _image(Component.RUNTIME, f"{REPOSITORY}/sandbox:0.1.5", base),
    )
    assert judge(_gateway("0.1.5"), *images).outcome is SUPPORTED


def test_a_digest_alone_says_no_revision_and_the_cure_is_named() -> None:
    pinned = _image(Component.SUPERVISOR, f"{REPOSITORY}/supervisor@{DIGEST}")
    runtime = _image(Component.RUNTIME, f"{REPOSITORY}/sandbox:0.1.5")
    finding = judge(_gateway("0.1.5"), pinned, runtime)
    assert finding.outcome is UNKNOWN_IMAGE
    assert finding.refused
    for word in ("supervisor image of unknown revision", "no tag", "name:version@sha256:", "compatibility = 'warn'"):
        assert word in finding.message


@pytest.mark.parametrize(
    "pinned",
    [
        _image(Component.SUPERVISOR, f"{REPOSITORY}/supervisor@{DIGEST}", {VERSION_LABEL: "0.1.5"}),
        _image(Component.SUPERVISOR, f"{REPOSITORY}/supervisor:0.1.5@{DIGEST}"),
        _image(Component.SUPERVISOR, DIGEST, {VERSION_LABEL: "0.1.5"}),
    ],
)
def test_a_pinned_image_fits_when_its_label_or_the_tag_beside_the_digest_says_so(pinned: Revision) -> None:
    runtime = _image(Component.RUNTIME, f"{REPOSITORY}/sandbox:0.1.5")
    assert judge(_gateway("0.1.5"), pinned, runtime).outcome is SUPPORTED


def test_an_unlabelled_image_without_a_version_tag_is_reported_verbatim() -> None:
    images = _upstream("m-dev", "0.1.5")
    finding = judge(_gateway("0.1.5"), *images)
    assert finding.outcome is UNKNOWN_IMAGE
    assert "tag 'm-dev' names no version" in finding.message


def test_an_unparsable_label_equal_everywhere_fits() -> None:
    label = {VERSION_LABEL: "nightly-17"}
    images = (_image(Component.SUPERVISOR, "a/b:x", label), _image(Component.RUNTIME, "a/c:x", label))
    assert judge(_gateway("nightly-17"), *images).outcome is SUPPORTED
    assert judge(_gateway("nightly-18"), *images).outcome is UNKNOWN_IMAGE


def test_a_refusal_names_each_component_its_revision_where_it_was_read_and_what_would_fit() -> None:
    finding = judge(_gateway("0.0.117-dev.160"), *_upstream("0.0.117-dev.158", "0.0.117-dev.158"))
    assert finding.message == (
        "gateway and images do not form a supported combination: "
        "gateway 0.0.117-dev.160 (handshake of openshell/gateway); "
        "supervisor image 0.0.117-dev.158 (tag of ghcr.io/nvidia/openshell/supervisor:0.0.117-dev.158); "
        "sandbox runtime image 0.0.117-dev.158 (tag of ghcr.io/nvidia/openshell/sandbox:0.0.117-dev.158). "
        "What would fit: supervisor_image and sandbox_runtime_image of revision 0.0.117-dev.160, "
        "or a gateway of revision 0.0.117-dev.158"
    )


def test_images_of_two_revisions_are_told_apart_even_before_a_gateway_is_known() -> None:
    finding = judge(gateway_revision(None), *_upstream("0.1.5", "0.1.4"))
    assert "no gateway has shaken hands yet" in finding.message
    assert "both of revision 0.1.5" in finding.message
    assert "older generation" in str(gateway_revision(None, older=True))


def test_swapped_images_are_refused_by_their_labels() -> None:
    supervisor, runtime = _ours()
    swapped_supervisor = image_revision(
        Component.SUPERVISOR, "openshell-local/runtime:64a5", ImageFacts(image_id="i", labels=_labels_of(Role.RUNTIME))
    )
    finding = judge(_gateway("0.1.5"), swapped_supervisor, runtime)
    assert finding.outcome is UNSUPPORTED
    assert "supervisor image is labelled as runtime" in finding.message
    workload = image_revision(Component.RUNTIME, "w:1", ImageFacts(image_id="i", labels=_labels_of(Role.WORKLOAD)))
    assert (
        "an image labelled runtime in sandbox_runtime_image" in judge(_gateway("0.1.5"), supervisor, workload).message
    )


@pytest.mark.parametrize(
    ("label", "word"), [("openshell.ai/isolation-protocol", "isolation"), ("openshell.ai/compute-protocol", "compute")]
)
def test_images_of_another_protocol_are_refused_by_their_labels(label: str, word: str) -> None:
    supervisor = _image(Component.SUPERVISOR, "a/b:0.1.5", _labels_of(Role.SUPERVISOR) | {label: "2.0"})
    finding = judge(_gateway(project_version(), EMBEDDED_GATEWAY), supervisor, _ours()[1])
    assert finding.outcome is UNSUPPORTED
    assert f"{word} protocol" in finding.message


def test_an_image_that_must_be_pulled_first_does_not_hold_a_launch_up() -> None:
    absent = image_revision(Component.SUPERVISOR, f"{REPOSITORY}/supervisor:0.1.4", None)
    finding = judge(_gateway("0.1.5"), absent, _upstream("", "0.1.5")[1])
    assert finding.outcome is Outcome.NOT_HERE_YET
    assert not finding.refused


def _labels_of(role: Role) -> dict[str, str]:
    return image_labels(role, project_version(), "c1")


@pytest.mark.parametrize(
    ("text", "parses", "prerelease"),
    [
        ("0.0.117-dev.160+g9c41f057c", True, True),
        ("0.0.117-rc.1", True, True),
        ("0.0.117-1", True, False),
        ("v1", True, False),
        ("m-dev", False, False),
        ("vm-dev", False, False),
        ("0.0.117-dirty", False, False),
        ("1.0.0-nightly.20260901", False, False),
        ("0.0.116-dev.160.g9c41", False, False),
        ("", False, False),
    ],
)
def test_field_report_69_and_70_versions_of_two_grammars(text: str, parses: bool, prerelease: bool) -> None:
    revision = _gateway(text or " ") if text else gateway_revision(None)
    assert (revision.version is not None) is parses
    if revision.version is not None:
        assert revision.version.is_prerelease is prerelease
    if text:
        assert text in str(revision)


def test_field_report_70_the_order_of_dev_builds_and_rebuilds() -> None:
    texts = ["0.0.117-dev.158", "0.0.117-dev.160+g9c41f057c", "0.0.117", "0.0.117-1"]
    versions = [version for text in texts if (version := _gateway(text).version) is not None]
    assert len(versions) == len(texts)
    assert sorted(versions) == versions


@given(st.text(max_size=300), st.text(max_size=300), st.text(max_size=300))
def test_no_text_of_a_peer_or_a_label_ever_crashes_or_overflows(gateway: str, label: str, reference: str) -> None:
    images = (
        _image(Component.SUPERVISOR, reference, {VERSION_LABEL: label}),
        _image(Component.RUNTIME, reference, {VERSION_LABEL: label[::-1]}),
    )
    finding = judge(_gateway(gateway), *images)
    assert len(public_text(finding.message).encode()) <= STATUS_TEXT_LIMIT_BYTES
    for one in images:
        assert one.same(one) is bool(one.text)


@given(
    st.sampled_from(["0.1.5", "0.1.5+a", "0.0.117-dev.160", "0.0.117-dev.160+g1", "dev.160", "m-dev", ""]), st.data()
)
def test_sameness_does_not_depend_on_the_side(text: str, data: st.DataObject) -> None:
    other = data.draw(st.sampled_from(["0.1.5", "0.1.5+b", "0.0.117-dev.160+g2", "dev.160", "dev.161", "m-dev", ""]))
    one, two = (
        Revision(component=Component.GATEWAY, line=Line.OPENSHELL, text=each, source="s") for each in (text, other)
    )
    assert one.same(two) is two.same(one)


@pytest.mark.parametrize(
    ("reference", "tag"),
    [
        ("a/b:0.1.5", "0.1.5"),
        ("localhost:5000/a/b", ""),
        ("localhost:5000/a/b:1.2", "1.2"),
        (f"a/b@{DIGEST}", ""),
        (f"a/b:0.1.5@{DIGEST}", "0.1.5"),
        (DIGEST, ""),
        ("not a reference", ""),
    ],
)
def test_a_port_or_a_digest_is_no_tag(reference: str, tag: str) -> None:
    assert reference_tag(reference) == tag
