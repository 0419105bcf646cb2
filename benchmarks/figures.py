"""Figures made of measurements, and where they are written."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lab.tools import BUILD

MIB = 1 << 20


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least ``percent`` % of the values do not exceed (nearest rank)."""
    ordered = sorted(values)
    rank = max(1, -(-len(ordered) * percent // 100))
    return ordered[int(rank) - 1]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Number, least, median, 95 % and largest of some values."""
    return {
        "n": len(values),
        "min": min(values),
        "median": percentile(values, 50),
        "p95": percentile(values, 95),
        "max": max(values),
    }


def machine() -> dict[str, Any]:
    """What the figures depend on. The load average tells whether others used the machine, too."""
    return {
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg(),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def write_json(name: str, figures: dict[str, Any]) -> Path:
    """Write figures to ``build/<name>.json`` in one step, and return that path."""
    BUILD.mkdir(exist_ok=True)
    path = BUILD / f"{name}.json"
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(figures, indent=2) + "\n")
    fresh.rename(path)
    return path


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows of text; all columns but the first are figures."""
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=any(columns))
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    # A pipe has no width to fit into.
    console = Console() if sys.stdout.isatty() else Console(width=200)
    console.print(f"[bold]{title}[/]", table, "", sep="\n", highlight=False)
