"""The pages on capabilities and compatibility say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from driver_docker.capabilities import GUARANTEES, SUPPORTED_CAPABILITIES
from driver_docker.compatibility import RULES
from driver_docker.config_sources import load_config
from driver_docker.errors import PreconditionError
from driver_docker.isolation_backends import BACKEND_SOCKET_DIR
from driver_docker.quantities import parse_limits
from openshell.isolation.endpoints import ENDPOINT_ERROR

DOCS = Path(__file__).parents[3] / "docs"


def _rows(page: str, heading: str) -> list[list[str]]:
    text = (DOCS / page).read_text(encoding="utf-8")
    table = text[text.index(heading) :].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[2:]]


def test_every_capability_is_in_the_table_with_its_words() -> None:
    rows = {row[0].strip("`| "): row[1].strip("| ") for row in _rows("capabilities.md", "| Capability |")}
    assert set(rows) == set(SUPPORTED_CAPABILITIES)
    for name, words in GUARANTEES.items():
        assert rows[name] == words
        assert re.fullmatch(r"openshell(\.[a-z0-9-]+){2,}", name)


def test_every_rule_of_revisions_is_in_the_table_in_order() -> None:
    rows = _rows("compatibility.md", "| Gateway | Images |")
    told = [(row[0].strip("|` "), row[1].strip("`"), row[2], row[3].strip("| ")) for row in rows]
    assert told == [
        (
            rule.gateway.value,
            rule.images.value,
            f"gateway release `{rule.gateway_versions}`"
            if rule.gateway_versions
            else f"image release `{rule.image_versions}`"
            if rule.image_versions
            else "one revision",
            rule.why,
        )
        for rule in RULES
    ]


def test_the_example_of_isolation_backends_is_a_configuration_that_loads(tmp_path: Path) -> None:
    text = (DOCS / "isolation-backends.md").read_text(encoding="utf-8")
    file = tmp_path / "driver.toml"
    file.write_text(text.partition("```toml\n")[2].partition("```")[0])
    config = load_config({"bind_socket": tmp_path / "d.sock"}, file=file, environment={})
    assert config.backend_name == "acme"
    assert set(config.isolation_backends) == {"acme", "acme-tcp"}
    for words in (ENDPOINT_ERROR, BACKEND_SOCKET_DIR):
        assert words in text


@pytest.mark.parametrize("quantity", ["cpu_request", "memory_request"])
def test_a_reservation_is_refused_as_the_capabilities_say(quantity: str) -> None:
    none = dict.fromkeys(("cpu_limit", "memory_limit", "cpu_request", "memory_request"), "")
    with pytest.raises(PreconditionError):
        parse_limits(**none | {quantity: "1"})
