"""What of the locked wheels goes into an image."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from devtools.images import wheels
from devtools.images.errors import BuildInputError
from devtools.images.wheels import LockedRequirement, read_lock, shipped_requirements, wheel_files

if TYPE_CHECKING:
    from pathlib import Path

LOCK = """
# a comment: name==1 --hash=sha256:no
Py_Jwt==2.1 \\
    --hash=sha256:bb \\
    --hash=sha256:aa
    # via other
grpcio==1.9 ; python_version >= "3.11" \\
    --hash=sha256:cc
"""


def install(site_packages: Path, name: str, version: str, files: dict[str, str]) -> None:
    info = f"{name}-{version}.dist-info"
    everything = {**files, f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"}
    record = "".join(f"{path},,\n" for path in [*everything, f"{info}/RECORD"])
    for path, text in {**everything, f"{info}/RECORD": record}.items():
        target = site_packages / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


def test_a_lock_file_is_read_with_its_hashes_in_order() -> None:
    assert read_lock(LOCK) == {
        "py-jwt": LockedRequirement(name="py-jwt", version="2.1", hashes=("sha256:aa", "sha256:bb")),
        "grpcio": LockedRequirement(name="grpcio", version="1.9", hashes=("sha256:cc",)),
    }


def test_only_what_runs_is_shipped(tmp_path: Path) -> None:
    files = [
        "tool/__init__.py",
        "tool/code.py",
        "tool/code.pyi",
        "tool/py.typed",
        "tool/native.abi3.so",
        "tool/include/native.h",
        "tool/roots.pem",
        "tool/tests/test_code.py",
        "tool/__pycache__/code.cpython-311.pyc",
        "tool-1.dist-info/licenses/LICENSE",
        "../../../bin/tool",
    ]
    install(tmp_path / "a" / "b" / "site-packages", "tool", "1", dict.fromkeys(files, "x"))

    shipped = [str(file.relative) for file in wheel_files(tmp_path / "a" / "b" / "site-packages", ["tool"])]

    assert shipped == [
        "tool/__init__.py",
        "tool/code.py",
        "tool/native.abi3.so",
        "tool-1.dist-info/METADATA",
        "tool-1.dist-info/licenses/LICENSE",
    ]


def test_what_is_installed_must_be_what_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels, "SHIPPED_DISTRIBUTIONS", ("grpcio",))
    install(tmp_path, "grpcio", "1.8", {})

    with pytest.raises(BuildInputError, match=r"grpcio 1\.8 is installed, but 1\.9 is locked"):
        shipped_requirements(read_lock(LOCK), tmp_path)


def test_what_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels, "SHIPPED_DISTRIBUTIONS", ("grpcio",))

    with pytest.raises(BuildInputError, match="grpcio goes into the images, but is not installed"):
        shipped_requirements(read_lock(LOCK), tmp_path)


def test_what_is_not_locked_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels, "SHIPPED_DISTRIBUTIONS", ("never",))

    with pytest.raises(BuildInputError, match="never goes into the images, but the lock file does not name it"):
        shipped_requirements(read_lock(LOCK), tmp_path)
