"""``./dev check``: every gate is run, and all failures are told in one table."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from devtools import layers, lockfile, protogen, traces
from devtools.console import say
from devtools.environment import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable

_SHOWN_LINES = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One gate: what it proves, and a function that returns the findings."""

    name: str
    proves: str
    run: Callable[[], list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a gate found, and how long it took."""

    check: Check
    findings: list[str]
    seconds: float


def _tool(*command: str) -> Callable[[], list[str]]:
    def run() -> list[str]:
        done = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 0:
            return []
        return (done.stdout + done.stderr).strip().splitlines() or [f"exit {done.returncode}"]

    return run


def _lock() -> list[str]:
    lock = (ROOT / lockfile.LOCK_NAME).read_text("utf-8")
    return lockfile.problems(lock, (ROOT / "pyproject.toml").read_text("utf-8"))


def _layers() -> list[str]:
    return [str(violation) for violation in layers.violations(ROOT)]


CHECKS: tuple[Check, ...] = (
    Check(
        name="lint",
        proves="ruff, public docstrings included",
        run=_tool("ruff", "check", "--output-format=concise", "."),
    ),
    Check(name="format", proves="ruff format", run=_tool("ruff", "format", "--check", ".")),
    Check(name="types", proves="mypy strict", run=_tool("mypy", "--no-error-summary")),
    Check(name="generated", proves="generated code is what proto/ generates", run=protogen.stale_files),
    Check(name="lock", proves="requirements.lock satisfies pyproject.toml", run=_lock),
    Check(name="layers", proves="rooms import in the designed directions", run=_layers),
    Check(name="traces", proves="no path or package index of one machine", run=lambda: traces.traces(ROOT)),
)


def run_checks(names: list[str]) -> int:
    """Run the named checks, or all, and report.

    Returns:
        0 where every check passed, else 1.
    """
    outcomes: list[Outcome] = []
    for check in [check for check in CHECKS if not names or check.name in names]:
        say(f"checking {check.name}: {check.proves}")
        begun = time.monotonic()
        try:
            # A check that breaks must not hide the others.
            findings = check.run()
        except Exception as error:
            findings = [f"the check itself broke: {type(error).__name__}: {error}"]
        outcomes.append(Outcome(check=check, findings=findings, seconds=time.monotonic() - begun))
    console = Console(soft_wrap=True)
    for outcome in outcomes:
        if outcome.findings:
            console.print(f"\n[bold]{outcome.check.name}[/bold]")
            for line in outcome.findings[:_SHOWN_LINES]:
                console.print(f"  {escape(line)}", highlight=False)
            if len(outcome.findings) > _SHOWN_LINES:
                console.print(f"  … and {len(outcome.findings) - _SHOWN_LINES} more lines")
    table = Table(box=None, pad_edge=False)
    for column in ("check", "proves", "outcome", "seconds"):
        table.add_column(column)
    for outcome in outcomes:
        verdict = f"FAILED ({len(outcome.findings)} lines)" if outcome.findings else "ok"
        table.add_row(outcome.check.name, outcome.check.proves, verdict, f"{outcome.seconds:.1f}")
    console.print()
    console.print(table)
    return 1 if any(outcome.findings for outcome in outcomes) else 0
