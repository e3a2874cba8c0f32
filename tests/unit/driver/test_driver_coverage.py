"""docs/driver-coverage.md lists every item, and every test that it names is there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Final

import pytest

TESTS: Final = Path(__file__).parents[2]
PAGE: Final = (TESTS.parent / "docs" / "driver-coverage.md").read_text("utf-8")
CHECKLIST: Final = frozenset(range(1, 10))
TRAPS: Final = frozenset(range(1, 15))
FIELD_REPORTS: Final = frozenset(range(1, 77)) - {34, 35, 37}
"""The numbers that there are; they are not contiguous."""
NOT_OF_THE_DRIVER: Final = frozenset({14, 19, 22, 23, 24, 45, 46, 62, 64, 71})
NOT_APPLICABLE: Final = "not applicable: "
NAMED: Final = re.compile(r"`([^`]+\.py)::(\w+)`")
NUMBERED: Final = re.compile(r"test_(checklist|trap|field_report)_(\d+)_((?:(?:and_)?\d\d_)*)")


def rows(heading: str) -> dict[int, str]:
    """What each row of a section's table says, by its number."""
    section = PAGE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    assert all(len(row) == 3 and all(row) for row in cells)
    numbers = [int(row[0]) for row in cells]
    assert numbers == sorted(set(numbers)), "each once, in order"
    return {int(row[0]): row[2] for row in cells}


CHECKLIST_ROWS: Final = rows("Checklist")
TRAP_ROWS: Final = rows("Traps")
REPORT_ROWS: Final = rows("Faults that were seen in the field")


@cache
def functions_of(path: str) -> frozenset[str]:
    """The names of the test functions of a file."""
    tree = ast.parse((TESTS / path).read_text("utf-8"))
    return frozenset(
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    )


def numbers_in(name: str) -> tuple[str, set[int]]:
    """What a test is named after: `test_field_report_20_and_27_…` after 20 and 27."""
    found = NUMBERED.match(name)
    return (found[1], {int(found[2]), *map(int, re.findall(r"\d\d", found[3]))}) if found else ("", set())


def test_every_item_is_listed() -> None:
    assert set(CHECKLIST_ROWS) == CHECKLIST
    assert set(TRAP_ROWS) == TRAPS
    assert set(REPORT_ROWS) == FIELD_REPORTS


def test_what_does_not_concern_the_driver_is_said_to_and_why() -> None:
    assert {number for number, text in REPORT_ROWS.items() if text.startswith(NOT_APPLICABLE)} == NOT_OF_THE_DRIVER
    assert not any(text.startswith(NOT_APPLICABLE) for text in (*CHECKLIST_ROWS.values(), *TRAP_ROWS.values()))


@pytest.mark.parametrize("text", [*CHECKLIST_ROWS.values(), *TRAP_ROWS.values(), *REPORT_ROWS.values()])
def test_every_named_test_exists(text: str) -> None:
    if text.startswith(NOT_APPLICABLE):
        assert len(text) > len(NOT_APPLICABLE)
        return
    named = NAMED.findall(text)
    assert named
    assert ", ".join(f"`{path}::{name}`" for path, name in named) == text, "nothing but tests"
    assert [f"{path}::{name}" for path, name in named if name not in functions_of(path)] == []


@pytest.mark.parametrize(
    ("kind", "listed"),
    [("checklist", CHECKLIST_ROWS), ("trap", TRAP_ROWS), ("field_report", REPORT_ROWS)],
    ids=["checklist", "trap", "field_report"],
)
def test_every_test_of_the_contract_suite_is_listed_under_its_item(kind: str, listed: dict[int, str]) -> None:
    files = sorted(path.relative_to(TESTS) for path in (TESTS / "contract").glob("test_*.py"))
    found = {f"{path}::{name}": numbers_in(name) for path in files for name in functions_of(str(path))}
    assert found
    assert [name for name, (named_after, _) in found.items() if not named_after] == []
    missing = [
        (number, name)
        for name, (named_after, numbers) in found.items()
        if named_after == kind
        for number in numbers
        if f"`{name}`" not in listed[number]
    ]
    assert missing == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("test_field_report_20_and_27_x", ("field_report", {20, 27})),
        ("test_field_report_66_67_x", ("field_report", {66, 67})),
        ("test_field_report_06_a_start_from_exited_143_x", ("field_report", {6})),
        ("test_checklist_3_a_create", ("checklist", {3})),
        ("test_something_else", ("", set())),
    ],
)
def test_a_test_is_named_after_its_items(name: str, expected: tuple[str, set[int]]) -> None:
    assert numbers_in(name) == expected
