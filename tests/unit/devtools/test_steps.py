from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from devtools import environment
from devtools.errors import StepFailedError

if TYPE_CHECKING:
    from collections.abc import Mapping

PARENT = """
import sys
from pathlib import Path
from devtools.console import run_step
child = "import signal, sys; open(sys.argv[1], 'w').write('up\\\\n'); pipe = open(sys.argv[1], 'w'); signal.pause()"
run_step([sys.executable, "-c", child, sys.argv[1]], title="a step", log=Path(sys.argv[2]))
"""


def test_a_step_ends_with_us_when_we_are_killed(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with (
        subprocess.Popen(
            [sys.executable, "-c", PARENT, str(pipe), str(tmp_path / "log")], stderr=subprocess.DEVNULL
        ) as parent,
        pipe.open("rb") as first,
    ):
        assert first.readline() == b"up\n"
        with pipe.open("rb") as held:  # opens once the step holds its other end for good
            parent.kill()
            assert select.select([held], [], [], 20)[0], "the step is still there"
            assert held.read() == b""


def test_what_an_interrupted_pip_leaves_lies_where_the_build_removes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "requirements.lock").touch()
    (tmp_path / "pyproject.toml").touch()
    folders: list[Path] = []

    def interrupted(command: object, *, environment: Mapping[str, str], **_options: object) -> None:
        folders.append(Path(environment["TMPDIR"]))
        (folders[-1] / "pip-unpack").mkdir()
        raise StepFailedError("interrupted")

    monkeypatch.setattr(environment, "run_step", interrupted)
    with pytest.raises(StepFailedError):
        environment.ensure(tmp_path)
    (folder,) = folders
    assert folder.is_relative_to(tmp_path / ".cache")
    assert not folder.exists()
