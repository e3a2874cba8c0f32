"""The page about images says what the code does."""

from __future__ import annotations

from pathlib import Path

from driver_docker.config import PullPolicy
from driver_docker.image_reference import DEFAULT_TAG, MUTABLE_TAGS
from driver_docker.platforms import PlatformError
from driver_docker.pull import ImageError
from driver_docker.pull_progress import INTERVAL_SECONDS
from driver_docker.registry_credentials import HELPER_TIMEOUT_SECONDS

PAGE = (Path(__file__).parents[3] / "docs" / "images.md").read_text("utf-8")


def rows(heading: str) -> set[str]:
    """First cells of the table under a heading."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    cells = [line.split("|")[1].strip(" `") for line in section.splitlines() if line.startswith("|")]
    return set(cells[2:])


def test_every_policy_has_its_row() -> None:
    assert rows("When an image is pulled") == {policy.value for policy in PullPolicy}


def test_every_reason_has_its_row() -> None:
    assert rows("Failures") == {ImageError.default_reason, PlatformError.default_reason}


def test_names_and_numbers_are_those_of_the_code() -> None:
    assert {"dev", "latest"} == MUTABLE_TAGS
    assert "their tag is `dev` or `latest`" in PAGE
    assert f"`{DEFAULT_TAG}` is filled in only" in PAGE
    assert round(1 / INTERVAL_SECONDS) == 10
    assert "At most ten such events a second" in PAGE
    assert f"at most {HELPER_TIMEOUT_SECONDS:g} s" in PAGE
