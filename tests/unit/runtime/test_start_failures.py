from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openshell.isolation.start_failures import StartFailure
from sandbox_runtime.launch import explain

if TYPE_CHECKING:
    from sandbox_runtime.launcher import Report


@pytest.mark.parametrize(
    ("program", "number", "existed", "was_executable", "failure"),
    [
        ("/bin/x", errno.ENOENT, False, False, StartFailure.NOT_FOUND),
        ("x", errno.ENOENT, False, False, StartFailure.NOT_IN_PATH),
        ("/bin/x", errno.ENOENT, True, True, StartFailure.NO_INTERPRETER),
        ("/bin/x", errno.EACCES, True, False, StartFailure.NOT_EXECUTABLE),
        ("/bin/x", errno.EACCES, True, True, StartFailure.NOT_ALLOWED),
        ("/bin/x", errno.ENOEXEC, True, True, StartFailure.BAD_FORMAT),
        ("/bin/x", errno.E2BIG, True, True, None),
    ],
)
def test_the_runtimes_words_are_understood(
    program: str, number: int, existed: bool, was_executable: bool, failure: StartFailure | None
) -> None:
    report: Report = {
        "stage": "execute",
        "path": program,
        "errno": number,
        "existed": existed,
        "was_executable": was_executable,
    }
    words = explain(program, report, search_path="/usr/bin:/bin")
    assert StartFailure.told_in(words) is failure
    assert StartFailure.told_in(f"process error: {words}") is failure


def test_a_working_directory_is_understood() -> None:
    report: Report = {
        "stage": "working directory",
        "path": "/nowhere",
        "errno": errno.ENOENT,
        "existed": False,
        "was_executable": False,
    }
    words = explain("/bin/x", report, search_path="")
    assert StartFailure.told_in(words) is StartFailure.WORKING_DIRECTORY


@given(st.text())
def test_no_other_words_are_repeated(words: str) -> None:
    assert StartFailure.told_in(words) is None
