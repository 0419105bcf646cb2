"""Whole images to many hosts: how long each method takes, and what the source sends.

Each host has a network namespace and a link of its own. The floor is the time that the image takes through one such
link once: no host can have all of it earlier, whatever sends.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from benchmarks.chunkrows.images import image_folder
from benchmarks.chunkrows.table import Line, markdown
from benchmarks.command import EXPECTED, SETTINGS, benchmark, finish
from benchmarks.deployrows.rows import METHODS, ROWS, Job
from benchmarks.deployrows.scenes import COLUMNS, Figures
from benchmarks.figures import print_table
from benchmarks.processes import say


@click.command(context_settings=SETTINGS)
@click.option("--row", "rows", multiple=True, type=click.Choice(list(ROWS)), help="[default: methods]")
@click.option("--hosts", default=10, show_default=True, type=click.IntRange(1, 200), help="Besides the origin.")
@click.option("--mib", default=512, show_default=True, type=click.IntRange(16), help="Size of the image, random bytes.")
@click.option("--rate", default=200, show_default=True, type=click.IntRange(1), help="Of each link, in Mbit/s.")
@click.option("--method", "methods", multiple=True, type=click.Choice(METHODS), help="[default: all]")
@click.option("--encrypt", is_flag=True, help="Of the rows methods, faults and lost.")
@click.option("--cases", default=30, show_default=True, type=click.IntRange(1), help="Of the row auto.")
@click.option("--seed", default=1, show_default=True, help="Of the row auto.")
def main(
    rows: tuple[str, ...], hosts: int, mib: int, rate: int, methods: tuple[str, ...], cases: int, seed: int,
    *, encrypt: bool,
) -> None:  # fmt: skip
    """Deploy an image to fresh hosts by each method.

    methods: to --hosts hosts. baselines: copies by scp, and from a shared file system. sites: half of the hosts in
    another site. racks: in four racks. faults: lost packets, and a slow host. lost: a host is killed. first: how soon a
    VM can boot. auto: random cases.

    Writes build/deploy.json, and prints tables. Needs root, iproute2, nftables, the programs of the methods, and twice
    the image for each host on the disk.

    \b
    Examples:
      python -m benchmarks.deploy
      python -m benchmarks.deploy --hosts 3 --mib 64 --method tree
      python -m benchmarks.deploy --row racks --row sites --hosts 20
    """
    with benchmark(), image_folder() as folder:
        figures: dict[str, list[Figures]] = {}
        lines: list[Line] = []
        failures: list[str] = []
        job = Job(hosts, mib, rate * 1_000_000, encrypt, methods or METHODS, cases, seed, folder, failures)
        for row in rows or ("methods",):
            try:
                figures[row], found = ROWS[row](job)
                lines += found
            except EXPECTED as error:
                failures.append(f"{row}: {' '.join(str(error).split())}")
        for row, found_figures in figures.items():
            print_table(f"{row}: {mib} MiB, links of {rate} Mbit/s", COLUMNS, [each.cells() for each in found_figures])
        say(markdown(lines))
        told: dict[str, Any] = {row: [asdict(each) for each in found] for row, found in figures.items()}
        finish("deploy", told | {"lines": [asdict(line) for line in lines]}, failures)


if __name__ == "__main__":
    main()
