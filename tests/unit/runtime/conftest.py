from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

SCENARIOS = Path(__file__).with_name("scenarios.py")


@pytest.fixture
def scenario() -> Callable[..., dict[str, Any]]:
    """Runs one of scenarios.py in a process of its own and returns what it printed."""

    def run(name: str, *arguments: object) -> dict[str, Any]:
        command = [sys.executable, "-W", "error", str(SCENARIOS), name, *map(str, arguments)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False, env={"PATH": "/usr/bin:/bin"}
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        result: dict[str, Any] = json.loads(done.stdout)
        return result

    return run
