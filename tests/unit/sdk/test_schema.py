from __future__ import annotations

import pytest

from openshell.errors import OpenShellError, UnknownReleaseError
from openshell.schema import (
    PUBLIC_RELEASES,
    inventory,
    own_descriptors,
    own_schema_sha256,
    release_descriptors,
)
from openshell.status import StatusCode

PUBLISHED = {
    "0.0.113": (72, 262, 11, "74669427784d89d4246978a8d39afd44c024bed66e79538c23407a5840f32424"),
    "0.0.116": (72, 262, 12, "1deb700e45775192f2697ed7789f0d80fe04ea948b61fc3d60e0c4467f193340"),
    "0.1.0": (82, 304, 25, "8fb59b0932ec2f227fdec2d46b6204925e79595695810a247bef731ddd632594"),
    "0.1.4": (83, 311, 27, "b6734ba353b4ffe81240309f7971ef48f6473e14ce2196412beabe1984b0548d"),
    "0.1.5": (84, 328, 29, "a91e2244a2c1a8e369efe85bd0e4f2769f0f29f6263137280fe38e8a8da3cc6e"),
}


def test_every_shipped_release_has_a_published_hash() -> None:
    assert set(PUBLIC_RELEASES) == set(PUBLISHED)


@pytest.mark.parametrize("version", PUBLIC_RELEASES)
def test_hash_equals_the_published_one(version: str) -> None:
    found = inventory(release_descriptors(version))
    assert (len(found.methods), len(found.messages), len(found.enums), found.sha256) == PUBLISHED[version]


def test_hash_equals_the_constant_in_upstream_source() -> None:
    files = release_descriptors("0.1.4")
    for file in files.file:
        for message in file.message_type:
            if message.name == "ListProvidersRequest":
                index = next(i for i, field in enumerate(message.field) if field.name == "label_selector")
                del message.field[index]
    assert inventory(files).sha256 == "5ae8334d9f6212a00c38ba965ff62e567d2846b15f4df8faf85954023da542e7"


def test_own_schema_is_the_0_1_5_one_plus_the_refusal_flag() -> None:
    files = own_descriptors()
    for file in files.file:
        for message in file.message_type:
            if message.name == "ReportSandboxConfigurationRequest":
                assert message.field[-1].name == "refused_before_start"
                assert message.field[-1].number == 4
                del message.field[-1]
    assert inventory(files).sha256 == PUBLISHED["0.1.5"][3]
    assert own_schema_sha256() not in {row[3] for row in PUBLISHED.values()}


def test_unknown_release_is_named_with_those_that_exist() -> None:
    with pytest.raises(UnknownReleaseError, match=r"'9\.9\.9'.*0\.1\.5") as caught:
        release_descriptors("9.9.9")
    assert isinstance(caught.value, OpenShellError)
    assert caught.value.status is StatusCode.NOT_FOUND
