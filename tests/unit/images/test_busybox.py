"""Where the workload's busybox comes from, on machines with and without one."""

from __future__ import annotations

import shutil
import stat
import sys
from pathlib import Path

import pytest

from devtools.images.busybox import find_busybox
from devtools.images.errors import BuildInputError

STATIC = find_busybox(None) if shutil.which("busybox") else None
needs_static = pytest.mark.skipif(STATIC is None, reason="needs a static busybox to begin with")


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def bare_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A search path with a dynamically linked busybox, and nothing else."""
    folder = tmp_path / "bin"
    folder.mkdir()
    shutil.copyfile(Path(sys.executable).resolve(), folder / "busybox")
    (folder / "busybox").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    return folder


@pytest.mark.usefixtures("bare_path")
def test_a_dynamically_linked_busybox_will_not_do_and_the_package_is_named() -> None:
    with pytest.raises(BuildInputError, match="install the Debian package busybox-static"):
        find_busybox()


@needs_static
def test_it_is_unpacked_from_the_package_once_and_kept(bare_path: Path, tmp_path: Path) -> None:
    program(bare_path / "apt-get", 'echo x >> "$0.calls"; : > busybox-static_1_all.deb')
    program(bare_path / "dpkg-deb", f'/bin/mkdir -p "$3/bin"; /bin/cp {STATIC} "$3/bin/busybox"')
    kept_in = tmp_path / "kept"
    kept_in.mkdir()

    first, second = find_busybox(kept_in), find_busybox(kept_in)

    assert first == second == kept_in / "busybox"
    assert first.stat().st_mode & stat.S_IXUSR
    assert (bare_path / "apt-get.calls").read_text() == "x\n"
    assert list(kept_in.iterdir()) == [first]


def test_a_package_that_cannot_be_fetched_says_why_and_leaves_nothing(bare_path: Path, tmp_path: Path) -> None:
    program(bare_path / "apt-get", "echo 'E: Unable to locate package' >&2; exit 100")
    kept_in = tmp_path / "kept"
    kept_in.mkdir()

    with pytest.raises(BuildInputError, match=r"has none \(E: Unable to locate package\); install"):
        find_busybox(kept_in)
    assert list(kept_in.iterdir()) == []
