"""The commands that look: `check`, `sandboxes`, `exits`, and `gc`, which looks before it removes."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from driver_docker import cli_output
from driver_docker.cli_options import UNSET_SOCKET, OutputFormat, config_options, load
from driver_docker.errors import ConfigurationError, DriverError, public_text
from driver_docker.exit_codes import ExitCode
from driver_docker.exit_journal import ExitJournal
from driver_docker.records import RecordStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from driver_docker.config import DriverConfig
    from driver_docker.engine_docker import DockerEngine
    from driver_docker.findings import Finding
    from driver_docker.leftovers import Removal, Survey
    from driver_docker.overview import Overview
    from driver_docker.records import UnreadableRecord

EXITS_SHOWN = 20
"""How many verdicts `exits` shows."""
_JSON = OutputFormat.JSON.value


@asynccontextmanager
async def _engine(config: DriverConfig) -> AsyncIterator[DockerEngine]:
    from driver_docker.engine_address import find_engine

    async with await find_engine(config, os.environ) as engine:
        yield engine


@click.command()
@config_options
def check(config_file: Path | None, output: str, **flags: Any) -> None:
    """Look at everything that a driver needs; name each fault and its cure. Exits with 1 where there is a fault."""
    from driver_docker.findings import Level, fault
    from driver_docker.preflight import run_preflight

    try:
        config = load(flags, file=config_file, serves=False)
    except ConfigurationError as error:
        cure = "correct the configuration, then check again; nothing else was looked at"
        findings = [fault("configuration", public_text(each), cure) for each in error.faults or (error.message,)]
        _print_findings(findings, output, failed=True)
        sys.exit(ExitCode.CONFIGURATION)
    else:
        findings = asyncio.run(run_preflight(config, os.environ))
        if config.bind_socket == UNSET_SOCKET:
            unset = fault("bind_socket", "not set", "give --bind-socket, for example /run/openshell-driver/driver.sock")
            findings = [unset, *(finding for finding in findings if finding.check != "bind_socket")]
    failed = any(finding.level is Level.FAULT for finding in findings)
    _print_findings(findings, output, failed=failed)
    sys.exit(ExitCode.FAULT if failed else ExitCode.FINE)


def _print_findings(findings: list[Finding], output: str, *, failed: bool) -> None:
    if output == _JSON:
        cli_output.print_json({"ok": not failed, "findings": [asdict(finding) for finding in findings]})
        return
    rows = [(finding.level.value, finding.check, finding.found, finding.cure) for finding in findings]
    cli_output.print_table(("LEVEL", "CHECK", "FOUND", "CURE"), rows, empty="nothing was looked at")


@click.command()
@config_options
def sandboxes(config_file: Path | None, output: str, **flags: Any) -> None:
    """List the sandboxes of this namespace, beside a running driver or without one.

    Exits with 1 where the engine cannot be asked.
    """
    from driver_docker.leftovers import is_locked
    from driver_docker.overview import look

    config = load(flags, file=config_file, serves=False)
    store = RecordStore(config.namespace_dir)

    async def run() -> tuple[Overview, str]:
        try:
            async with _engine(config) as engine:
                return await look(store, config.sandbox_label, engine), ""
        except DriverError as error:
            # The records alone are still worth showing.
            return await look(store, config.sandbox_label, None), error.public_message

    found, trouble = asyncio.run(run())
    driver_runs = is_locked(store.directory)
    _print_sandboxes(found, config, output, trouble=trouble, driver_runs=driver_runs)
    sys.exit(ExitCode.FAULT if trouble else ExitCode.FINE)


def _print_sandboxes(found: Overview, config: DriverConfig, output: str, *, trouble: str, driver_runs: bool) -> None:
    if output == _JSON:
        cli_output.print_json(
            {
                "namespace": config.sandbox_label,
                "driver_runs": driver_runs,
                "engine_error": trouble,
                "sandboxes": [view.to_json() for view in found.views],
                "unreadable": [asdict(each) for each in found.unreadable],
            }
        )
        return
    if trouble:
        click.echo(f"the engine was not asked: {trouble}", err=True)
    if found.views and not driver_runs:
        click.echo("no driver runs here: what the last one recorded is shown beside what the engine says now", err=True)
    _print_unreadable(found.unreadable)
    rows = [
        (
            view.record.sandbox_id,
            f"{view.record.workspace}/{view.record.name}",
            view.record.shown_phase,
            f"{view.ready.status.value} {view.ready.reason}",
            view.workload,
            view.supervisor,
            view.record.generation,
            view.ready.message,
        )
        for view in found.views
    ]
    head = ("ID", "NAME", "PHASE", "READY", "WORKLOAD", "SUPERVISOR", "GENERATION", "MESSAGE")
    cli_output.print_table(head, rows, empty="no sandboxes are recorded")


def _print_unreadable(records: tuple[UnreadableRecord, ...]) -> None:
    for each in records:
        text = f"sandbox {each.sandbox_id} is left alone: {each.why}"
        click.echo(cli_output.printable(text), err=True)


@click.command()
@click.argument("sandbox", required=False, default="", metavar="[SANDBOX]")
@config_options
def exits(sandbox: str, config_file: Path | None, output: str, **flags: Any) -> None:
    """Show the last 20 verdicts with the raw ends of their logs, those of deleted sandboxes included.

    SANDBOX is an id or the beginning of one, a name, or workspace/name. Exits with 1 where nothing is recorded of it.
    """
    config = load(flags, file=config_file, serves=False)
    entries = ExitJournal(config.namespace_dir).read(of=sandbox, limit=EXITS_SHOWN)
    if output == _JSON:
        cli_output.print_json({"namespace": config.sandbox_label, "exits": [entry.to_json() for entry in entries]})
    elif sandbox and not entries:
        click.echo(
            f"no exits are recorded of {cli_output.printable(sandbox)}; give its id or the beginning of that, "
            "its name, or workspace/name; without one, all are shown",
            err=True,
        )
    elif not entries:
        click.echo("no exits are recorded", err=True)
    if sandbox and not entries:
        sys.exit(ExitCode.FAULT)
    if output == _JSON:
        return
    for entry in entries:
        click.echo(cli_output.printable(f"{entry.at.isoformat()}  {entry.sandbox_id}  {entry.workspace}/{entry.name}"))
        click.echo(f"  {cli_output.printable(entry.message)}")
        for key, value in entry.verdict.items():
            if not key.endswith(".words"):
                click.echo(cli_output.printable(f"  {key.removeprefix('openshell.verdict.')}: {value}"))
        for line in entry.tail.splitlines():
            click.echo(f"  | {cli_output.printable(line)}")


@click.command()
@click.option("--dry-run", is_flag=True, help="List what would be removed, and remove nothing.")
@config_options
def gc(config_file: Path | None, output: str, *, dry_run: bool, **flags: Any) -> None:
    """Remove what carries this driver's own owner label and no sandbox uses. Exits with 1 where something is left."""
    from driver_docker.leftovers import Removal, Sweeper

    config = load(flags, file=config_file, serves=False)
    store = RecordStore(config.namespace_dir)

    async def run() -> tuple[Survey, tuple[Removal, ...]]:
        async with _engine(config) as engine:
            sweeper = Sweeper(engine, store, config)
            if not dry_run:
                return await sweeper.sweep()
            found = await sweeper.survey()
            return found, tuple(Removal(leftover=leftover) for leftover in found.leftovers)

    found, removals = asyncio.run(run())
    failed = any(removal.error for removal in removals)
    _print_removals(found, removals, output, dry_run=dry_run)
    sys.exit(ExitCode.FAULT if failed else ExitCode.FINE)


def _print_removals(found: Survey, removals: tuple[Removal, ...], output: str, *, dry_run: bool) -> None:
    done = "would be removed" if dry_run else "removed"
    if output == _JSON:
        items = [
            asdict(removal.leftover) | {"removed": not dry_run and not removal.error, "error": removal.error}
            for removal in removals
        ]
        cli_output.print_json(
            {
                "dry_run": dry_run,
                "driver_runs": found.driver_runs,
                "foreign_left_alone": found.foreign,
                "unreadable_left_alone": [asdict(each) for each in found.unreadable],
                "items": items,
            }
        )
        return
    _print_unreadable(found.unreadable)
    rows = [
        (removal.leftover.kind.value, removal.leftover.name, removal.leftover.why, removal.error or done)
        for removal in removals
    ]
    cli_output.print_table(("KIND", "NAME", "WHY", "RESULT"), rows, empty="nothing is left over")
    notes = [f"{len(removals)} found"]
    if found.driver_runs:
        notes.append("a driver runs: only what it does not know was considered")
    if found.foreign:
        notes.append(f"{found.foreign} of other drivers left alone")
    click.echo("; ".join(notes), err=True)
