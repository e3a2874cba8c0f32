"""The artifact cache: whole files or none, and each built once."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from devtools.images.cache import ArtifactCache, cache_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path


@pytest.fixture
def cache(tmp_path: Path) -> ArtifactCache:
    return ArtifactCache(tmp_path / "cache")


def leftovers(cache: ArtifactCache) -> list[str]:
    return sorted(path.name for path in cache.root.iterdir() if path.name != "locks")


def writing(content: bytes) -> Callable[[Path, Path], Mapping[str, str]]:
    def write(path: Path, work: Path) -> Mapping[str, str]:
        assert list(work.iterdir()) == []
        path.write_bytes(content)
        return {"fact": "true"}

    return write


def test_a_made_file_is_found_with_its_facts(cache: ArtifactCache) -> None:
    path, facts = cache.make("a", writing(b"content"))

    found = cache.find("a")
    assert found == (path, facts)
    assert path.read_bytes() == b"content"
    assert facts["fact"] == "true"


def test_an_interrupted_build_leaves_nothing(cache: ArtifactCache) -> None:
    def interrupted(path: Path, work: Path) -> Mapping[str, str]:
        path.write_bytes(b"half")
        (work / "more").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.make("a", interrupted)

    assert leftovers(cache) == []
    assert cache.find("a") is None


def test_a_build_that_was_killed_is_swept_by_the_next_one(cache: ArtifactCache) -> None:
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from devtools.images.cache import ArtifactCache\n"
        "def write(path, work):\n"
        "    path.write_bytes(b'half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "ArtifactCache(Path(sys.argv[1])).make('a', write)\n"
    )
    killed = subprocess.run([sys.executable, "-c", program, str(cache.root)], check=False)
    assert killed.returncode == -9
    assert [name for name in leftovers(cache) if name.startswith("building-")]

    cache.make("a", writing(b"whole"))

    assert leftovers(cache) == ["a.json", "a.tar"]


def test_a_build_in_progress_is_not_swept_by_another(cache: ArtifactCache) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def slow(path: Path, work: Path) -> Mapping[str, str]:
        (work / "kept").touch()
        entered.set()
        assert go_on.wait(20)
        assert (work / "kept").exists()
        path.write_bytes(b"slow")
        return {}

    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(cache.make, "slow", slow)
        assert entered.wait(20)
        try:
            cache.make("other", writing(b"other"))
        finally:
            go_on.set()
        assert waiting.result(20)[0].read_bytes() == b"slow"


def test_a_truncated_file_does_not_count(cache: ArtifactCache) -> None:
    path, _ = cache.make("a", writing(b"content"))
    path.write_bytes(b"cont")

    assert cache.find("a") is None


@pytest.mark.parametrize("facts", [b"", b"{", b"[]", b'{"size_bytes": "1"}'])
def test_damaged_facts_do_not_count(cache: ArtifactCache, facts: bytes) -> None:
    path, _ = cache.make("a", writing(b"content"))
    path.with_suffix(".json").write_bytes(facts)

    assert cache.find("a") is None


def test_many_askers_build_once(cache: ArtifactCache) -> None:
    builds: list[int] = []
    together = threading.Barrier(6)

    def write(path: Path, work: Path) -> Mapping[str, str]:
        builds.append(1)
        path.write_bytes(b"content")
        return {}

    def ask() -> bytes:
        together.wait(20)
        return cache.make("a", write)[0].read_bytes()

    with ThreadPoolExecutor(6) as pool:
        results = [pool.submit(ask) for _ in range(6)]
        assert {result.result(20) for result in results} == {b"content"}
    assert builds == [1]


def test_old_files_are_forgotten_and_recent_ones_kept(cache: ArtifactCache) -> None:
    for index in range(8):
        path, _ = cache.make(f"image-{index}", writing(b"x"))
        if index < 6:
            os.utime(path, (1000 + index, 1000 + index))
    cache.make("other", writing(b"x"))

    cache.prune("image-")

    assert [name for name in leftovers(cache) if name.endswith(".tar")] == [
        "image-4.tar",
        "image-5.tar",
        "image-6.tar",
        "image-7.tar",
        "other.tar",
    ]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"OPENSHELL_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/openshell-docker"),
        ({"OPENSHELL_CACHE_DIR": "", "XDG_CACHE_HOME": "/b"}, "/b/openshell-docker"),
    ],
)
def test_the_cache_lies_where_the_environment_says(environment: dict[str, str], expected: str) -> None:
    assert str(cache_folder(environment)) == expected
