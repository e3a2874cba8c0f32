"""The driver's README says what the code does."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from devtools.driver_reference import README, RPC_CALLS, filled_in, tables
from driver_docker import leftovers
from driver_docker.exit_journal import MAX_ENTRIES
from driver_docker.metered_engine import CALLS

if TYPE_CHECKING:
    from pathlib import Path

TEXT = README.read_text("utf-8")


def test_every_table_is_the_one_that_the_code_gives() -> None:
    assert filled_in(TEXT) == TEXT, "run: .venv/bin/python -m devtools.driver_reference"


def test_every_table_has_a_place_and_rows() -> None:
    assert set(re.findall(r"<!-- table: ([a-z-]+) -->", TEXT)) == set(tables())
    assert all(len(table.splitlines()) > 2 for table in tables().values())


def test_every_call_to_the_engine_is_documented_with_its_request() -> None:
    rows = tables()["engine-calls"].splitlines()[2:]
    assert {row.split("`")[1] for row in rows} == CALLS
    for row in rows:
        assert re.search(r"`(GET|POST|PUT|HEAD|DELETE) /", row), row


def test_the_calls_of_the_rpcs_are_calls_of_the_engine() -> None:
    for always, sometimes in RPC_CALLS.values():
        assert set(always) | set(sometimes) <= CALLS
        assert not set(always) & set(sometimes)


def test_every_configuration_key_has_a_meaning() -> None:
    for row in tables()["configuration"].splitlines()[2:]:
        assert len(row.split(" | ")[-1].strip(" |")) > 10, row


def test_numbers_in_the_text_are_those_of_the_code() -> None:
    assert f"holds the last {MAX_ENTRIES} " in TEXT
    assert leftovers.GRACE_SECONDS == 60  # "older than a minute"


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)#:]+)\)", TEXT))))
def test_links_lead_somewhere(target: str) -> None:
    file: Path = README.parent / target
    assert file.exists()
