from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING

import pytest

from devtools import environment
from devtools.errors import StepFailedError

if TYPE_CHECKING:
    from pathlib import Path

PYTHON = (3, 11)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repository"
    root.mkdir()
    (root / "requirements.lock").write_text("a==1\n")
    (root / "pyproject.toml").write_text('[project]\nname = "x"\n[tool.ruff]\nline-length = 100\n')
    return root


def make_fresh(root: Path) -> None:
    (root / ".venv" / "bin").mkdir(parents=True)
    (root / ".venv" / "bin" / "python").symlink_to(sys.executable)
    (root / ".venv" / environment.STAMP_NAME).write_text(environment.stamp(root, PYTHON))


def test_a_missing_environment_is_stale(repository: Path) -> None:
    assert environment.why_stale(repository, PYTHON) == "there is none"


def test_an_environment_made_from_the_same_files_is_fresh(repository: Path) -> None:
    make_fresh(repository)
    assert environment.why_stale(repository, PYTHON) is None


def test_an_environment_without_its_stamp_is_not_complete(repository: Path) -> None:
    make_fresh(repository)
    (repository / ".venv" / environment.STAMP_NAME).unlink()
    assert environment.why_stale(repository, PYTHON) == "it was not made by ./dev, or not completed"


def test_an_environment_whose_interpreter_was_removed_is_stale(repository: Path) -> None:
    make_fresh(repository)
    (repository / ".venv" / "bin" / "python").unlink()
    (repository / ".venv" / "bin" / "python").symlink_to(repository / "gone")
    assert environment.why_stale(repository, PYTHON) == "its interpreter is gone"


def test_another_lock_file_makes_it_stale(repository: Path) -> None:
    make_fresh(repository)
    (repository / "requirements.lock").write_text("a==2\n")
    assert environment.why_stale(repository, PYTHON) is not None


def test_other_project_metadata_makes_it_stale_but_an_option_of_a_tool_does_not(repository: Path) -> None:
    make_fresh(repository)
    pyproject = repository / "pyproject.toml"
    pyproject.write_text(pyproject.read_text().replace("100", "120"))
    assert environment.why_stale(repository, PYTHON) is None
    pyproject.write_text(pyproject.read_text().replace('"x"', '"y"'))
    assert environment.why_stale(repository, PYTHON) is not None


def test_another_python_makes_it_stale_and_both_are_named(repository: Path) -> None:
    make_fresh(repository)
    assert environment.why_stale(repository, (3, 12)) == "it has Python 3.11, and ./dev runs on 3.12"


def test_a_repository_that_was_moved_needs_a_new_environment(repository: Path) -> None:
    make_fresh(repository)
    moved = repository.with_name("moved")
    shutil.move(repository, moved)
    assert environment.why_stale(moved, PYTHON) is not None


def test_a_build_that_fails_leaves_the_old_environment_as_it_was(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_fresh(repository)
    marker = repository / ".venv" / "old"
    marker.touch()
    (repository / "requirements.lock").write_text("no-such-thing @ file:///nonexistent\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(StepFailedError, match="locked packages"):
        environment.ensure(repository)
    assert marker.exists()
    assert environment.why_stale(repository, sys.version_info[:2]) is not None
    assert not (repository / ".cache" / "dev" / "venv-new").exists()


def test_what_would_leak_into_the_environment_is_taken_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("PYTHONHOME", "/elsewhere")
    child = environment.child_environment(tmp_path)
    assert "PYTHONPATH" not in child
    assert "PYTHONHOME" not in child
    assert child["PATH"].split(os.pathsep)[0] == str(tmp_path / ".venv" / "bin")
