from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

FOLDER = Path(__file__).parent


def run(script: str, name: str, *arguments: object) -> dict[str, Any]:
    command = [sys.executable, "-W", "error", str(FOLDER / script), name, *map(str, arguments)]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(FOLDER.parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.fixture
def scenario() -> Callable[..., dict[str, Any]]:
    """Runs one of scenarios.py in a process of its own and returns what it printed."""
    return partial(run, "scenarios.py")


@pytest.fixture
def backend_scenario() -> Callable[..., dict[str, Any]]:
    """The same for scenarios_backend.py."""
    return partial(run, "scenarios_backend.py")
