from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[2] / "conftest.py"

LEAKS = {
    "nothing": ("assert True", None),
    "thread": ("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()", "threads"),
    "descriptor": ("import socket; test_it.kept = socket.socketpair()", "descriptors"),
    "file": ("test_it.kept = open('/dev/null')", "descriptors"),
    "executor": ("import asyncio; await asyncio.to_thread(id, 1)", None),
    "finished task": ("import asyncio; await asyncio.create_task(asyncio.sleep(0))", None),
    "task": ("import asyncio; test_it.kept = asyncio.create_task(asyncio.Event().wait())", "tasks"),
}


@pytest.mark.parametrize("leak", LEAKS)
def test_what_a_test_leaves_behind_fails_it(tmp_path: Path, leak: str) -> None:
    statement, kind = LEAKS[leak]
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    (tmp_path / "test_leak.py").write_text(
        f"import pytest\n@pytest.mark.usefixtures('no_leaks')\nasync def test_it():\n    {statement}\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\nmarkers = engine: engine\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(CONFTEST.parent)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (kind is None), done.stdout
    assert kind is None or f"{kind} left behind" in done.stdout
