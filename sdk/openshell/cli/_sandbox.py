"""``openshell sandbox``: create, get, list and delete."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from openshell.cli._context import Shared

if TYPE_CHECKING:
    from openshell import OpenShell, WatchEvent
    from openshell.v1 import Sandbox
    from openshell.verdicts import Verdict

_OUTPUT = click.option(
    "-o", "--output", type=click.Choice(["text", "json"]), default="text", show_default=True, help="How to print."
)

_QUANTITY = re.compile(r"([0-9]+(\.[0-9]*)?|\.[0-9]+)([numkKMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]{1,2})?", re.ASCII)
"""Kubernetes' grammar of quantities; what a gateway takes of it is for the gateway to say."""


def _quantity(_: click.Context, parameter: click.Parameter, value: str) -> str:
    if value and not _QUANTITY.fullmatch(value):
        example = "500m or 2" if parameter.name == "cpu" else "256Mi or 2Gi"
        raise click.BadParameter(f"{value!r} is not a quantity, such as {example}")
    return value


@click.group()
def sandbox() -> None:
    """Create, show, list and delete sandboxes."""


@sandbox.command()
@click.argument("name", default="")
@click.argument("command", nargs=-1)
@click.option("--image", default="", metavar="REF", help="Image of the workload. [default: the driver's]")
@click.option("-e", "--env", "environment", multiple=True, metavar="KEY=VALUE", help="Variable of the main process.")
@click.option("-l", "--label", "labels", multiple=True, metavar="KEY=VALUE", help="Label of the sandbox.")
@click.option("--cpu", default="", callback=_quantity, metavar="QUANTITY", help="CPU limit, for example 500m.")
@click.option("--memory", default="", callback=_quantity, metavar="QUANTITY", help="Memory limit, for example 256Mi.")
@click.option("--tty/--no-tty", default=False, help="Give the main process a terminal.")
@click.option("--wait/--no-wait", default=True, show_default=True, help="Wait until it is Ready.")
@click.option(
    "--timeout", "timeout_seconds", default=300.0, show_default=True, metavar="SECONDS", help="How long to wait."
)
@_OUTPUT
@click.pass_obj
def create(
    shared: Shared,
    name: str,
    command: tuple[str, ...],
    image: str,
    environment: tuple[str, ...],
    labels: tuple[str, ...],
    cpu: str,
    memory: str,
    tty: bool,
    wait: bool,
    timeout_seconds: float,
    output: str,
) -> None:
    """Create the sandbox NAME, whose main process is COMMAND (write it after --)."""
    with shared.client() as client:
        made = client.sandboxes.create(
            name,
            image=image,
            command=command,
            environment=_pairs(environment, "--env"),
            labels=_pairs(labels, "--label"),
            cpu_limit=cpu,
            memory_limit=memory,
            tty=tty,
        )
        if wait and made.metadata is not None:
            made = _wait_ready(client, made.metadata.name, timeout_seconds) or made
        _print_sandbox(made, None, output)


@sandbox.command()
@click.argument("name")
@_OUTPUT
@click.pass_obj
def get(shared: Shared, name: str, output: str) -> None:
    """Show the sandbox NAME, its conditions, and why its supervisor last ended."""
    with shared.client() as client:
        found = client.sandboxes.get(name)
        _print_sandbox(found, client.sandboxes.last_supervisor_exit(name), output)


@sandbox.command("list")
@click.option("-l", "--selector", default="", metavar="KEY=VALUE", help="Only sandboxes with this label.")
@click.option("-A", "--all-workspaces", is_flag=True, help="Look in every workspace.")
@_OUTPUT
@click.pass_obj
def list_sandboxes(shared: Shared, selector: str, all_workspaces: bool, output: str) -> None:
    """List sandboxes."""
    from openshell._progress import ready_condition
    from openshell.cli._render import age, phase_name, sandbox_facts

    with shared.client() as client:
        found = list(client.sandboxes.list(label_selector=selector, all_workspaces=all_workspaces))
    if output == "json":
        click.echo(json.dumps([sandbox_facts(one) for one in found], indent=2))
        return
    if not found:
        click.echo("no sandboxes")
        return
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("NAME", "WORKSPACE", "PHASE", "AGE", "REASON"):
        table.add_column(column, overflow="fold")
    now = datetime.now(UTC)
    for one in found:
        ready = ready_condition(one)
        metadata = one.metadata
        table.add_row(
            escape(metadata.name) if metadata else "-",
            escape(metadata.workspace) if metadata else "-",
            phase_name(one),
            age(metadata.created_time if metadata else None, now),
            escape(ready.reason) if ready else "",
        )
    Console().print(table)


@sandbox.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.option("--allow-missing", is_flag=True, help="Do not fail where there is no such sandbox.")
@click.option("--wait/--no-wait", default=True, show_default=True, help="Wait until it is gone.")
@click.option(
    "--timeout", "timeout_seconds", default=60.0, show_default=True, metavar="SECONDS", help="How long to wait."
)
@click.pass_obj
def delete(shared: Shared, names: tuple[str, ...], allow_missing: bool, wait: bool, timeout_seconds: float) -> None:
    """Delete sandboxes and everything that belongs to them."""
    from openshell import Goal

    with shared.client() as client:
        for name in names:
            client.sandboxes.delete(name, allow_missing=allow_missing)
            if wait:
                client.sandboxes.wait(name, Goal.DELETED, timeout_seconds=timeout_seconds)
            click.echo(f"sandbox {name} deleted" if wait else f"sandbox {name} is being deleted")


def _wait_ready(client: OpenShell, name: str, timeout_seconds: float) -> Sandbox | None:
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True)
    with console.status(f"sandbox {name}: waiting for the gateway") as status:

        def show(event: WatchEvent) -> None:
            if event.step:
                status.update(f"sandbox {name}: {escape(event.step)}")

        return client.sandboxes.wait(name, timeout_seconds=timeout_seconds, on_event=show)


def _print_sandbox(found: Sandbox, verdict: Verdict | None, output: str) -> None:
    from openshell.cli._render import sandbox_facts, sandbox_lines

    if output == "json":
        click.echo(json.dumps(sandbox_facts(found, verdict), indent=2))
    else:
        click.echo("\n".join(sandbox_lines(found, verdict)))


def _pairs(items: tuple[str, ...], option: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for item in items:
        key, separator, value = item.partition("=")
        if not separator or not key:
            raise click.BadParameter(f"{item!r} is not KEY=VALUE", param_hint=option)
        found[key] = value
    return found
