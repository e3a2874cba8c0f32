"""References are taken apart as engines and registries do it: no tag is invented where something else is named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver_docker.image_reference import ImageReference, ImageReferenceError, parse_reference
from openshell.status import StatusCode

DIGEST = "sha256:" + "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("text", "registry", "path", "tag", "digest", "asked_for"),
    [
        ("busybox", "docker.io", "library/busybox", "", "", "latest"),
        ("busybox:1.36", "docker.io", "library/busybox", "1.36", "", "1.36"),
        ("a/b", "docker.io", "a/b", "", "", "latest"),
        ("docker.io/busybox", "docker.io", "library/busybox", "", "", "latest"),
        ("index.docker.io/a/b:2", "docker.io", "a/b", "2", "", "2"),
        ("host:5000/x", "host:5000", "x", "", "", "latest"),
        ("localhost/x", "localhost", "x", "", "", "latest"),
        ("localhost:5000/a/b:2", "localhost:5000", "a/b", "2", "", "2"),
        ("127.0.0.1:5000/a__b/c.d-e", "127.0.0.1:5000", "a__b/c.d-e", "", "", "latest"),
        ("[::1]:5000/x:y", "[::1]:5000", "x", "y", "", "y"),
        ("UPPER/x", "UPPER", "x", "", "", "latest"),
        (f"x@{DIGEST}", "docker.io", "library/x", "", DIGEST, DIGEST),
        (f"x:tag@{DIGEST}", "docker.io", "library/x", "tag", DIGEST, DIGEST),
        (f"host:5000/x:tag@{DIGEST}", "host:5000", "x", "tag", DIGEST, DIGEST),
    ],
)
def test_field_report_docker_py_1643_latest_is_asked_for_only_where_nothing_else_is_named(
    text: str, registry: str, path: str, tag: str, digest: str, asked_for: str
) -> None:
    found = parse_reference(text)
    assert (found.registry, found.path, found.tag, found.digest) == (registry, path, tag, digest)
    assert found.pulled_tag == asked_for
    assert str(found) == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "name"),
        ("x:", "tag"),
        ("x:-a", "tag"),
        ("x:" + "a" * 129, "tag"),
        ("x@", "digest"),
        ("x@sha256:ff", "digest"),
        (f"x@{DIGEST}@{DIGEST}", "digest"),
        ("X", "lower-case"),
        ("a//b", "lower-case"),
        ("a/../b", "lower-case"),
        ("a.b:5000/", "name"),
        ("-a.b/c", "registry"),
        ("a.b:port/c", "registry"),
        ("x?all=1", "lower-case"),
        ("x#y", "lower-case"),
        ("x y", "lower-case"),
        ("x\n", "lower-case"),
        ("https://a.b/c", "registry"),
        ("a" * 256, "255"),
        ("a" * 2000, "1024"),
    ],
)
def test_what_is_no_reference_is_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(ImageReferenceError, match=words) as refused:
        parse_reference(text)
    assert refused.value.status is StatusCode.INVALID_ARGUMENT
    assert refused.value.public_message.isprintable()


@pytest.mark.parametrize("text", [DIGEST, DIGEST.removeprefix("sha256:")])
def test_an_image_id_is_no_name(text: str) -> None:
    found = parse_reference(text)
    assert found.is_id
    assert found.local == found.canonical == str(found) == DIGEST
    assert not found.is_mutable


@pytest.mark.parametrize(
    ("text", "mutable"),
    [("x", True), ("x:latest", True), ("h:1/x:dev", True), ("x:1", False), (f"x:dev@{DIGEST}", False)],
)
def test_only_moving_tags_are_mutable(text: str, mutable: bool) -> None:
    assert parse_reference(text).is_mutable is mutable


def test_spellings_of_one_image_have_one_canonical_form() -> None:
    spellings = ("busybox", "busybox:latest", "docker.io/busybox", "index.docker.io/library/busybox:latest")
    assert len({parse_reference(text).canonical for text in spellings}) == 1
    assert parse_reference(f"x:1@{DIGEST}").canonical == parse_reference(f"x@{DIGEST}").canonical
    assert parse_reference("h:1/x").canonical != parse_reference("h:2/x").canonical


words = st.from_regex(r"[a-z0-9]{1,20}((\.|_|__|-{1,3})[a-z0-9]{1,20}){0,2}", fullmatch=True)
registries = st.one_of(
    st.none(),
    st.just("localhost"),
    st.from_regex(r"[a-z0-9]{1,8}\.[a-z]{2,5}(:[0-9]{1,5})?", fullmatch=True),
    st.from_regex(r"[a-zA-Z0-9]{1,8}:[0-9]{1,5}", fullmatch=True),
)
tags = st.one_of(st.just(""), st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,20}", fullmatch=True))
digests = st.one_of(st.just(""), st.from_regex(r"sha256:[0-9a-f]{64}", fullmatch=True))


@given(registry=registries, path=st.lists(words, min_size=1, max_size=3), tag=tags, digest=digests)
def test_every_part_that_is_put_together_is_found_again(
    registry: str | None, path: list[str], tag: str, digest: str
) -> None:
    if registry is None and path[0] == "localhost":
        path[0] = "host"
    if registry is None:
        path[0] = path[0].replace(".", "-")  # a first word with a dot would be a registry
    name = "/".join([*([registry] if registry else []), *path])
    text = name + (f":{tag}" if tag else "") + (f"@{digest}" if digest else "")
    if len(name) == 64 and text == name:
        return
    found = parse_reference(text)
    assert (str(found), found.name, found.tag, found.digest) == (text, name, tag, digest)
    assert found.registry == (registry or "docker.io")
    assert found.path.removeprefix("library/") == "/".join(path).removeprefix("library/")
    assert found.pulled_tag == (digest or tag or "latest")
    again = parse_reference(found.canonical)
    assert again.canonical == found.canonical
    assert parse_reference(found.local).canonical == found.canonical


@given(st.text(max_size=80))
def test_any_text_is_a_reference_or_refused_with_words(text: str) -> None:
    try:
        found = parse_reference(text)
    except ImageReferenceError as error:
        assert error.public_message
        return
    assert isinstance(found, ImageReference)
    assert text.isascii()
    assert not set(text) & set("?#%&= \\\n")
