"""docs/verdicts.md says what the code does."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

from driver_docker.verdict import Reason
from openshell.verdicts import Category, Component, KilledBy, LastWords, Stage, Verdict, VerdictKind

PAGE = (Path(__file__).parents[3] / "docs" / "verdicts.md").read_text("utf-8")


def rows(heading: str) -> list[list[str]]:
    """The cells of the table under a heading, without its two head lines."""
    section = PAGE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_kind_is_documented_in_its_order_and_as_the_failure_it_is() -> None:
    documented = [(row[0].strip("`"), row[2] == "yes") for row in rows("Kinds")]
    real = [
        (kind.value, Verdict(kind=kind, reason="r", component=Component.SUPERVISOR).is_failure) for kind in VerdictKind
    ]
    assert documented == real


def test_every_metadata_key_is_documented_in_its_order() -> None:
    now = datetime(2026, 10, 5, tzinfo=UTC)
    full = Verdict(
        kind=VerdictKind.EXITED,
        reason="r",
        component=Component.SUPERVISOR,
        exit_code=1,
        signal="SIGKILL",
        killed_by=KilledBy.UNKNOWN,
        started_at=now,
        finished_at=now,
        memory_limit_bytes=1,
        engine_error="e",
        words="w",
        stage=Stage.BUILD,
        category=Category.CONFIGURATION,
        generation="g",
    )
    assert [row[0].strip("`") for row in rows("Metadata")] == list(full.to_metadata())


def test_the_values_of_the_enumerations_are_documented() -> None:
    values = {row[0].strip("`").rpartition(".")[2]: set(re.findall(r"`([a-z_]+)`", row[1])) for row in rows("Metadata")}
    assert values["killed_by"] == {member.value for member in KilledBy}
    assert values["stage"] | {"unknown"} == {member.value for member in Stage}
    assert values["category"] | {"unknown"} == {member.value for member in Category}
    assert values["component"] | {"unknown"} == {member.value for member in Component}


def test_the_documented_reasons_are_real() -> None:
    assert {row[0].strip("`") for row in rows("Reasons")} <= {reason.value for reason in Reason}


def test_the_documented_last_words_are_read() -> None:
    found = LastWords.find_in(PAGE)
    assert found == LastWords(
        stage=Stage.ATTACH,
        category=Category.POLICY_REFUSED,
        public="shown to the owner",
        private="for the operator",
    )
