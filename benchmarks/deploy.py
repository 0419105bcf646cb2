"""Whole images to many hosts: how long each method takes, and what the source sends.

Each host has a network namespace and a link of its own. The floor is the time that the image takes through one such
link once: no host can have all of it earlier, whatever sends.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.chunkrows.images import image_folder, random_file
from benchmarks.command import EXPECTED, SETTINGS, benchmark, finish
from benchmarks.errors import Failed
from benchmarks.figures import MIB, print_table
from benchmarks.hosts import started_cluster
from benchmarks.processes import say
from lab.cluster import network_names
from lab.network import Network

IMAGE = "img"
METHODS = ("tree", "lazy", "unicast", "udpcast", "uftp", "bittorrent", "auto")
COLUMNS = ("method", "hosts", "time", "times the floor", "sent by the source, times the image")


@dataclass(frozen=True)
class Figures:
    """One deployment to fresh hosts. ``seconds`` until Volt knows that all are whole; ``sent``: bytes of the source."""

    method: str
    hosts: int
    seconds: float
    floor: float
    sent: int
    size: int

    def cells(self) -> list[str]:
        """For people."""
        times, sent = self.seconds / self.floor, self.sent / self.size
        return [self.method, str(self.hosts), f"{self.seconds:.1f} s", f"{times:.2f}", f"{sent:.2f}"]


def deployed(method: str, hosts: int, rate: int, image: Path, leftovers: list[str]) -> Figures:
    """Deploy an image to fresh hosts. ``rate``: bits a second of each link. Raises Failed, NoNetwork and others."""
    size = image.stat().st_size
    with (
        Network(network_names(hosts + 1), rate=rate) as network,
        started_cluster("deploy", hosts, 2, leftovers, network) as cluster,
    ):
        origin = cluster.agents[0]
        origin.publish(IMAGE, image)
        before, begun = network.sent_bytes("origin"), time.monotonic()
        made = origin.deploy({"image": IMAGE, "everywhere": True, "method": method, "parallel": 1})
        ended = origin.follow_deployment(made.id)
        seconds = time.monotonic() - begun
        if failed := [f"{host.host}: {host.error or host.state}" for host in ended.hosts if host.state != "whole"]:
            raise Failed(f"{method}, {hosts} hosts: {'; '.join(failed)}")
        return Figures(method, hosts, seconds, size * 8 / rate, network.sent_bytes("origin") - before, size)


@click.command(context_settings=SETTINGS)
@click.option("--hosts", default=10, show_default=True, type=click.IntRange(1, 200), help="Besides the origin.")
@click.option("--mib", default=512, show_default=True, type=click.IntRange(1), help="Size of the image, random bytes.")
@click.option("--rate", default=200, show_default=True, type=click.IntRange(1), help="Of each link, in Mbit/s.")
@click.option("--method", "methods", multiple=True, type=click.Choice(METHODS), help="[default: all]")
def main(hosts: int, mib: int, rate: int, methods: tuple[str, ...]) -> None:
    """Deploy an image to fresh hosts by each method.

    Writes build/deploy.json, and prints a table. Needs root, iproute2, and twice the image for each host on the disk.

    \b
    Examples:
      python -m benchmarks.deploy
      python -m benchmarks.deploy --hosts 3 --mib 64 --method tree
    """
    with benchmark(), image_folder() as folder:
        image = random_file(folder / "image.raw", mib * MIB)
        figures: list[Figures] = []
        failures: list[str] = []
        for method in methods or METHODS:
            try:
                figures.append(deployed(method, hosts, rate * 1_000_000, image, failures))
                say(", ".join(figures[-1].cells()))
            except EXPECTED as error:
                failures.append(f"{method}: {' '.join(str(error).split())}")
        print_table(f"{mib} MiB, links of {rate} Mbit/s", COLUMNS, [each.cells() for each in figures])
        told: dict[str, Any] = {"deployments": [asdict(each) for each in figures]}
        finish("deploy", told, failures)


if __name__ == "__main__":
    main()
