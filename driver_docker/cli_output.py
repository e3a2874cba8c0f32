"""Printing: one JSON document, or a table that is safe for a terminal."""

from __future__ import annotations

import json
import shutil
import sys
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_UNBOUNDED_COLUMNS: Final = 10_000


def print_json(document: Any) -> None:
    """Print a document for programs."""
    click.echo(json.dumps(document, indent=2))


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print aligned columns; wrapped on a terminal, one line a row elsewhere."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _UNBOUNDED_COLUMNS
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in head:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    console = Console(width=width, file=sys.stdout, highlight=False)
    with console.capture() as capture:
        console.print(table)
    click.echo("\n".join(line.rstrip() for line in capture.get().splitlines()))


def printable(text: str) -> str:
    """A text without what a terminal would obey; line breaks and tabs stay."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)
