"""Printing: one JSON document, or a table that is safe for a terminal."""

from __future__ import annotations

import json
import shutil
import sys
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_WIDEST_PADDING: Final = 40
"""Columns of a table that is no terminal's are aligned up to this width; a longer cell moves only its own row."""


def print_json(document: Any) -> None:
    """Print a document for programs."""
    click.echo(json.dumps(document, indent=2))


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]], *, empty: str) -> None:
    """Print aligned columns; wrapped on a terminal, one line a row elsewhere.

    Args:
        head: The columns' names.
        rows: A text for each column.
        empty: Said on standard error instead of a table without rows.
    """
    cells = [[printable(cell) for cell in row] for row in rows]
    if not cells:
        click.echo(empty, err=True)
    elif sys.stdout.isatty():
        click.echo(_wrapped(head, cells, width=shutil.get_terminal_size().columns))
    else:
        lines = [list(head), *([" ".join(cell.split()) for cell in row] for row in cells)]
        widths = [min(max(map(len, column)), _WIDEST_PADDING) for column in zip(*lines, strict=True)]
        for line in lines:
            padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            click.echo("  ".join(padded).rstrip())


def _wrapped(head: Sequence[str], rows: Iterable[Sequence[str]], *, width: int) -> str:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in head:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console = Console(width=width, file=sys.stdout, highlight=False)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def printable(text: str) -> str:
    """A text without what a terminal would obey; line breaks and tabs stay."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)
