"""What the data path costs: reads of a VM's disk through the tree, against the bare file of the host.

The kernel stack is measured in guests of the kernel lab, whose processors are emulated: its times are to be compared
with those of the same run alone. The links of the guests answer late in some of the runs. The chunk store is measured
on this machine, its hosts side by side.
"""

from __future__ import annotations

from typing import Any

import click

from benchmarks import kernelpath, userpath
from benchmarks.command import SETTINGS, benchmark, finish
from benchmarks.figures import print_table
from benchmarks.pathreads import COLUMNS, HOSTS, LARGE, SINGLE

STACKS = ("kernel", "chunkstore")
DELAYS_MS = (0, 1, 5)


def report(stack: str, figures: dict[str, Any]) -> None:
    """Print two tables."""
    print_table(
        f"{stack}: reads of a VM's disk; large reads of the bare file take {figures['bare_cpu']:.2f} CPU s/GiB",
        COLUMNS,
        [each.row() for each in figures["measured"]],
    )
    below = 0.0
    rows = []
    for name, seconds in figures["layers"].items():
        rows.append([name, f"{seconds * 1e6:.0f}", f"{(seconds - below) * 1e6:+.0f}"])
        below = seconds
    print_table(f"{stack}: a warm read of 4 KiB, by layer", ("read from", "µs", "over the one before, µs"), rows)
    if figures.get("sums"):
        print_table(
            f"{stack}: a disk by iSCSI alone, with these sums on the wire", SUMS_COLUMNS, sums_rows(figures["sums"])
        )


SUMS_COLUMNS = ("sums", "4 KiB, µs", "1 MiB, µs", "child, CPU s/GiB", "parent, CPU s/GiB")


def sums_rows(sums: dict[str, dict[str, float]]) -> list[list[str]]:
    """A row for each kind of sums."""
    return [
        [name, *(f"{each[reads.name] * 1e6:.0f}" for reads in (SINGLE, LARGE)), *(f"{each[who]:.2f}" for who in HOSTS)]
        for name, each in sums.items()
    ]


@click.command(context_settings=SETTINGS)
@click.option("--stack", "stacks", multiple=True, type=click.Choice(STACKS), help="Only this one.  [default: both]")
@click.option("--suite", default="", help="The guests' Debian release, by its codename.  [default: this machine's]")
@click.option(
    "--delay", "delays", multiple=True, type=click.IntRange(0, 100), help="Of the links, ms.  [default: 0, 1, 5]"
)
def main(stacks: tuple[str, ...], suite: str, delays: tuple[int, ...]) -> None:
    """Measure cold and warm reads through one and three levels of hosts.

    Writes build/data_path.json and prints tables.

    \b
    Examples:
      python -m benchmarks.data_path                   # about 20 minutes
      python -m benchmarks.data_path --stack kernel --suite trixie
    """
    with benchmark():
        failures: list[str] = []
        done: dict[str, Any] = {}
        for stack in stacks or STACKS:
            kernel = stack == "kernel"
            measured = (
                kernelpath.measure(suite, delays or DELAYS_MS, failures) if kernel else userpath.measure(failures)
            )
            report(stack, measured)
            done[stack] = {**measured, "measured": [each.figures() for each in measured["measured"]]}
        finish("data_path", done, failures)


if __name__ == "__main__":
    main()
