"""What `./dev images` prints, and what it loads."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from devtools import commands, prepared
from devtools.errors import PreconditionError
from devtools.images import BuiltImage, ImageSet


def image(role: str) -> BuiltImage:
    return BuiltImage(
        reference=f"openshell-local/{role}:0123456789ab", archive_path=Path(f"/cache/{role}.tar"), image_id="sha256:1"
    )


IMAGES = ImageSet(workload=image("workload"), runtime=image("runtime"), supervisor=image("supervisor"))


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[ImageSet]:
    """What was loaded."""
    found: list[ImageSet] = []
    monkeypatch.setattr(prepared, "build_images", lambda: IMAGES)
    monkeypatch.setattr(prepared, "load_into_engine", found.append)
    return found


def test_they_are_only_built_unless_asked_otherwise(loaded: list[ImageSet], capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.images([]) == 0
    assert "openshell-local/runtime:0123456789ab\t/cache/runtime.tar" in capsys.readouterr().out
    assert loaded == []


def test_loaded_ones_are_printed_as_the_drivers_configuration(
    loaded: list[ImageSet], capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.images(["--load"]) == 0
    assert loaded == [IMAGES]
    assert tomllib.loads(capsys.readouterr().out) == {
        "supervisor_image": "openshell-local/supervisor:0123456789ab",
        "sandbox_runtime_image": "openshell-local/runtime:0123456789ab",
        "default_image": "openshell-local/workload:0123456789ab",
    }


def test_without_an_engine_none_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(PreconditionError, match=r"none\.sock.*no such socket.*\n.*DOCKER_HOST"):
        prepared.load_into_engine(IMAGES)
