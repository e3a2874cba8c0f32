from __future__ import annotations

from pathlib import Path

import pytest

from devtools import layers

ROOT = Path(__file__).parents[3]


def test_the_repository_keeps_the_directions() -> None:
    assert [str(violation) for violation in layers.violations(ROOT)] == []


@pytest.mark.parametrize(
    ("room", "module", "is_allowed"),
    [
        ("openshell", "openshell.status", True),
        ("openshell", "driver_docker.plan", False),
        ("openshell", "grpc", True),
        ("driver_docker", "openshell.wire.compute.v1", True),
        ("driver_docker", "openshell.verdicts", True),
        ("driver_docker", "openshell.isolation.documents", True),
        ("driver_docker", "openshell.client", False),
        ("driver_docker", "gateway_embedded.store", False),
        ("gateway_embedded", "driver_docker.verdict", False),
        ("gateway_embedded", "openshell.verdicts", True),
        ("sandbox_runtime", "openshell.isolation.server", True),
        ("sandbox_runtime", "openshell.client", False),
        ("supervisor_reference", "sandbox_runtime.server", False),
        ("examples", "openshell.OpenShell", True),
        ("examples", "openshell._client", False),
        ("examples", "driver_docker.cli", False),
        ("driver_docker", "devtools.engine", False),
    ],
)
def test_a_room_imports_what_the_design_allows(room: str, module: str, is_allowed: bool) -> None:
    assert (layers.why_forbidden(room, module) is None) == is_allowed


def test_imports_inside_functions_and_relative_ones_are_seen() -> None:
    source = "def f():\n    from . import a\n    from ..b import c\n    import d.e\n"
    assert layers.imported_modules(source, "room.sub") == [(2, "room.sub.a"), (3, "room.b.c"), (4, "d.e")]


def test_a_violation_names_file_line_and_rule(tmp_path: Path) -> None:
    for folder in layers.ROOM_FOLDERS.values():
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "devtools").mkdir()
    for name in layers.BOOTSTRAP_MODULES:
        (tmp_path / "devtools" / f"{name}.py").write_text("import json\nfrom devtools import console\n")
    (tmp_path / "devtools" / "debian.py").write_text("import rich\n")
    (tmp_path / "driver_docker" / "bad.py").write_text("import os\nimport gateway_embedded\n")
    found = [str(violation) for violation in layers.violations(tmp_path)]
    assert found == [
        "driver_docker/bad.py:2: imports gateway_embedded: driver_docker may import only "
        + ", ".join(layers.ALLOWED["driver_docker"]),
        "devtools/debian.py:1: imports rich: runs before there is a virtual environment",
    ]
