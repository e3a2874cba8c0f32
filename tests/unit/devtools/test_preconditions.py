from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from devtools import commands, environment, prepared
from devtools.errors import PreconditionError

if TYPE_CHECKING:
    from pathlib import Path


def test_a_cache_folder_that_cannot_be_written_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("OPENSHELL_CACHE_DIR", str(tmp_path / "file" / "cache"))
    for use in (prepared.build_images, prepared.prepared_engine().__enter__):
        with pytest.raises(PreconditionError, match="OPENSHELL_CACHE_DIR"):
            use()


def test_a_repository_that_cannot_be_written_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "requirements.lock").touch()
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / ".cache").touch()
    with pytest.raises(PreconditionError, match="cannot be written"):
        environment.ensure(tmp_path)


@pytest.mark.parametrize("arguments", [["--nonsense"], ["more"], ["--keep-logs"]])
def test_a_demo_that_is_asked_for_wrongly_starts_nothing(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prepared, "prepared_engine", pytest.fail)
    with pytest.raises(SystemExit) as ended:
        commands.demo(arguments)
    assert ended.value.code == 2
    assert "usage: ./dev demo" in capsys.readouterr().err


def test_the_demo_does_not_tell_what_others_do_on_the_engine_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def prepared_engine(*, is_shared: bool) -> None:
        asked.append(is_shared)
        raise PreconditionError("none")

    monkeypatch.setattr(prepared, "prepared_engine", prepared_engine)
    with pytest.raises(PreconditionError):
        commands.demo([])
    assert asked == [True]
