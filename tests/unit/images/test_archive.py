"""Layers and archives: what is written is what was described, byte for byte the same each time."""

from __future__ import annotations

import hashlib
import json
import random
import tarfile
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devtools.images.archive import (
    Entry,
    EntryKind,
    ImageConfig,
    directory,
    symlink,
    with_parents,
    write_archive,
    write_layer,
)

if TYPE_CHECKING:
    from pathlib import Path

ENTRIES = [
    Entry(path="bin/tool", mode=0o555, content=b"#!/bin/sh\n"),
    symlink("bin/other", "tool"),
    Entry(path="etc/passwd", content=b"root:x:0:0::/:\n"),
    directory("tmp", mode=0o1777),
    directory("home/agent", mode=0o700, uid=1000, gid=1001),
]


def members(path: Path) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(path) as tar:
        return {member.name: member for member in tar.getmembers()}


def test_the_same_entries_in_any_order_give_the_same_bytes(tmp_path: Path) -> None:
    first = write_layer(ENTRIES, tmp_path / "first")
    shuffled = ENTRIES.copy()
    random.Random(7).shuffle(shuffled)
    second = write_layer(shuffled, tmp_path / "second")

    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()
    assert first.diff_id == second.diff_id


def test_a_file_on_disk_and_the_same_bytes_in_memory_are_the_same_layer(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"content")
    from_disk = write_layer([Entry(path="a", source=source)], tmp_path / "disk")
    from_memory = write_layer([Entry(path="a", content=b"content")], tmp_path / "memory")

    assert from_disk.diff_id == from_memory.diff_id


def test_a_layer_says_its_digest_and_size(tmp_path: Path) -> None:
    layer = write_layer(ENTRIES, tmp_path / "layer")
    data = (tmp_path / "layer").read_bytes()

    assert layer.diff_id == f"sha256:{hashlib.sha256(data).hexdigest()}"
    assert layer.size_bytes == len(data)


def test_owners_modes_and_kinds_are_kept_and_times_are_none(tmp_path: Path) -> None:
    write_layer(ENTRIES, tmp_path / "layer")
    found = members(tmp_path / "layer")

    assert found["bin/tool"].mode == 0o555
    assert (found["bin/other"].issym(), found["bin/other"].linkname) == (True, "tool")
    assert (found["tmp"].isdir(), found["tmp"].mode) == (True, 0o1777)
    assert (found["home/agent"].uid, found["home/agent"].gid) == (1000, 1001)
    assert {member.mtime for member in found.values()} == {0}
    assert {(member.uname, member.gname) for member in found.values()} == {("", "")}


def test_missing_parents_come_first_and_belong_to_root() -> None:
    paths = [(entry.path, entry.kind) for entry in with_parents([Entry(path="a/b/c", content=b"")])]

    assert paths == [("a", EntryKind.DIRECTORY), ("a/b", EntryKind.DIRECTORY), ("a/b/c", EntryKind.FILE)]


def test_a_described_parent_is_not_replaced() -> None:
    described = directory("a", mode=0o700, uid=5)

    assert with_parents([Entry(path="a/b", content=b""), described])[0] == described


def test_a_path_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="twice"):
        with_parents([Entry(path="a"), directory("a")])


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../up", "a/../b", "a//b", "a/", "./a", "."])
def test_a_path_that_is_not_relative_and_normalised_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="relative and normalised"):
        Entry(path=path)


segments = st.text(st.characters(min_codepoint=33, max_codepoint=0x2FF, exclude_characters="/\x7f"), min_size=1).filter(
    lambda name: name not in {".", ".."}
)


@given(files=st.dictionaries(segments, st.binary(max_size=2000), max_size=12))
def test_every_written_file_is_read_back(files: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("layer") / "layer"
    write_layer([Entry(path=f"folder/{name}", content=content) for name, content in files.items()], path)

    with tarfile.open(path) as tar:
        read = {
            member.name.removeprefix("folder/"): body.read()
            for member in tar.getmembers()
            if (body := tar.extractfile(member)) is not None
        }
    assert read == files


def test_an_archive_is_consistent_with_itself(tmp_path: Path) -> None:
    layers = [write_layer(ENTRIES, tmp_path / "low"), write_layer([directory("top")], tmp_path / "high")]
    config = ImageConfig(
        user="1:2",
        entrypoint=("/tool",),
        command=("x",),
        environment={"B": "2", "A": "1"},
        labels={"l": "v"},
        architecture="arm64",
    )
    image_id = write_archive(reference="local/it:tag", config=config, layers=layers, path=tmp_path / "archive")

    with tarfile.open(tmp_path / "archive") as tar:
        contents = {m.name: body.read() for m in tar.getmembers() if (body := tar.extractfile(m)) is not None}
    manifest = json.loads(contents["manifest.json"])
    document = contents[manifest[0]["Config"]]
    described = json.loads(document)
    digests = [f"sha256:{hashlib.sha256(contents[name]).hexdigest()}" for name in manifest[0]["Layers"]]

    assert image_id == f"sha256:{hashlib.sha256(document).hexdigest()}"
    assert manifest[0]["RepoTags"] == ["local/it:tag"]
    assert described["rootfs"]["diff_ids"] == digests == [layer.diff_id for layer in layers]
    assert described["architecture"] == "arm64"
    assert described["config"] == {
        "User": "1:2",
        "Entrypoint": ["/tool"],
        "Cmd": ["x"],
        "Env": ["A=1", "B=2"],
        "Labels": {"l": "v"},
        "WorkingDir": "/",
    }


def test_an_archive_of_the_same_parts_is_the_same(tmp_path: Path) -> None:
    layer = write_layer(ENTRIES, tmp_path / "layer")
    for name in ("one", "two"):
        write_archive(reference="a:b", config=ImageConfig(), layers=[layer], path=tmp_path / name)

    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
