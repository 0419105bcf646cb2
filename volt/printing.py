"""Tables and drawings for people, on a terminal and elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import click

LONG = 1000
"""Columns that no drawing needs."""
GAP = 2
"""Columns of a terminal between two of a table."""


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table. On a terminal long cells are folded; elsewhere a row is one line, however long."""
    cells = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        _draw(columns, cells)
    else:
        click.echo("\n".join(_lines([columns, *cells])))


def _lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row, as long as it is."""
    widths = [max(map(_width, column)) for column in zip(*rows, strict=True)]
    return [
        "".join(cell + " " * (width + GAP - _width(cell)) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _width(text: str) -> int:
    """Columns of a terminal."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def _draw(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        drawn.add_column(column, overflow="fold")
    for row in rows:
        drawn.add_row(*row)
    Console(markup=False, emoji=False).print(drawn)


def draw(drawing: Any) -> None:
    """Print what rich can draw, in full width when the output is not a terminal."""
    from rich.console import Console

    if sys.stdout.isatty():
        Console().print(drawing)
    else:
        Console(width=LONG).print(drawing, soft_wrap=True)
