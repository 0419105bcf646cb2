"""What the chunk store must show: the table of docs/performance.md.

Each row compares with what it replaces in the same run: the userspace drivers of the last commit that had them, other
NBD servers, local files, or what must travel at least.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from benchmarks.chunkrows import boots, crowd, filling, kills, shaped, together, turns, updates, warm, waves
from benchmarks.chunkrows.scale import FULL, QUICK, Job
from benchmarks.chunkrows.table import COLUMNS, Line, markdown, put_between_marks
from benchmarks.chunkrows.versions import CHECKED_OUT, COMMIT, checked_out
from benchmarks.command import EXPECTED, SETTINGS, benchmark, finish
from benchmarks.figures import print_table
from benchmarks.processes import say
from lab.tools import CHECKOUT

ROWS: Mapping[str, Callable[[Job], list[Line]]] = {
    "warm": warm.measure,
    "boot": boots.measure,
    "wave": waves.measure,
    "together": together.measure,
    "update": updates.measure,
    "sparse": filling.measure,
    "pool": turns.measure,
    "crowd": crowd.measure,
    "kill": kills.measure,
    "network": shaped.measure,
    "hydration": shaped.beside_hydration,
}
PAGE = CHECKOUT / "docs/performance.md"
FIGURES = CHECKOUT / "benchmarks/chunkrows/figures.json"
"""What the page was written from: a row that is not measured again keeps its figures."""


def measured(
    rows: Sequence[str], job: Job, figures: Mapping[str, Any], keep: Callable[[Mapping[str, Any]], None]
) -> tuple[dict[str, Any], list[str]]:
    """The ``figures`` with those of these rows, by row, saved after each; and what failed. A failure loses no row."""
    found, failures = dict(figures), []
    for row in rows:
        say(f"row {row}")
        try:
            lines = ROWS[row](job)
        except EXPECTED as error:
            failures.append(f"{row}: {' '.join(str(error).split())}")
            continue
        day = datetime.now(UTC).date().isoformat()
        found[row] = {"day": day, "cpus": os.cpu_count(), "lines": [line.__dict__ for line in lines]}
        keep(found)
        print_table(row, COLUMNS, [line.cells() for line in lines])
    return {row: found[row] for row in ROWS if row in found}, failures


def keep(figures: Mapping[str, Any]) -> None:
    """Keep the figures so far, and have the documentation tell them."""
    fresh = FIGURES.with_suffix(".new")
    fresh.write_text(json.dumps(figures, indent=1) + "\n")
    fresh.rename(FIGURES)
    put_between_marks(PAGE, text(figures))


def _forget(_figures: Mapping[str, Any]) -> None:
    """What a quick run measures tells nothing."""


def text(figures: Mapping[str, Any]) -> str:
    """What the documentation says."""
    days = sorted({each["day"] for each in figures.values()})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    cpus = next(iter(figures.values()))["cpus"]
    lines = [Line(**line) for each in figures.values() for line in each["lines"]]
    return f"{when}, {cpus} cores, `python -m benchmarks.chunkstore`. *Before* is commit {COMMIT}.\n\n{markdown(lines)}"


@click.command(context_settings=SETTINGS)
@click.option("--row", "rows", multiple=True, type=click.Choice(list(ROWS)), help="Only this one.  [default: all]")
@click.option("--quick", is_flag=True, help="Tiny sizes, to see that it works. The documentation stays as it is.")
@click.option(
    "--before", type=click.Path(file_okay=False, path_type=Path),
    help=f"A checkout of {COMMIT}.  [default: {CHECKED_OUT.relative_to(CHECKOUT)}, which is made]",
)  # fmt: skip
@click.option(
    "--image", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Raw disk. Default: the lab's guest."
)
def main(rows: tuple[str, ...], quick: bool, before: Path | None, image: Path | None) -> None:
    """Measure the chunk store against what it replaces.

    Writes build/chunkstore.json and the table of docs/performance.md, and prints tables. Rows that are not measured
    keep the figures that the table has. Needs fio, nbdkit, qemu-utils and iproute2; 25 GiB of disk; about an hour.

    \b
    Examples:
      python -m benchmarks.chunkstore --quick
      python -m benchmarks.chunkstore --row warm --row boot
    """
    with benchmark():
        name = "chunkstore-quick" if quick else "chunkstore"
        job = Job(QUICK if quick else FULL, checked_out(before), image)
        earlier = {} if quick else json.loads(FIGURES.read_text())
        figures, failures = measured(rows or list(ROWS), job, earlier, _forget if quick else keep)
        finish(name, {"rows": figures}, failures)


if __name__ == "__main__":
    main()
