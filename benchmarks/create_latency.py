"""How long it takes to create a VM's disk on a host that has the image: at the agent, and through the command line.

Beside both: a bare ``qemu-img create`` of a disk of the same layout, which is the least that such a disk costs, and a
bare start of the command line's Python.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from benchmarks.attach import timed
from benchmarks.command import SETTINGS, benchmark, finish
from benchmarks.disks import empty_disk
from benchmarks.figures import MIB, print_table, spread
from benchmarks.hosts import settled_places, started_cluster
from benchmarks.processes import say
from lab.cluster import Cluster, tool
from lab.tools import run

IMAGE = "created"
IMAGE_BYTES = 64 * MIB
AGENT_BAR_S, CLI_BAR_S = 0.05, 0.3
"""What the medians are to stay below, in seconds."""


def at_the_agent(cluster: Cluster, rounds: int) -> list[float]:
    """Seconds of each create by a client on the agent's socket."""
    agent = cluster.agents[1]
    seconds = [timed(agent.create, f"vm-{number}", IMAGE) for number in range(rounds)]
    for number in range(rounds):
        agent.destroy(f"vm-{number}")
    return seconds


def by_command_line(cluster: Cluster, rounds: int) -> list[float]:
    """Seconds of each ``virtman create``, from the start of its process to its end."""
    command = [tool("virtman"), "--socket", cluster.socket(1)]
    seconds = [timed(run, [*command, "create", f"cli-{number}", IMAGE]) for number in range(rounds)]
    for number in range(rounds):
        cluster.agents[1].destroy(f"cli-{number}")
    return seconds


def bare_processes(rounds: int) -> dict[str, list[float]]:
    """Seconds of the processes that nobody could do without."""
    with tempfile.TemporaryDirectory() as name:
        backing = Path(name) / "image"
        disks = [Path(name) / f"{number}.qcow2" for number in range(rounds)]
        return {
            "qemu_img_create": [timed(empty_disk, disk, backing, IMAGE_BYTES) for disk in disks],
            "python_start": [timed(run, [sys.executable, "-c", ""]) for _ in range(rounds)],
        }


def measure(rounds: int, leftovers: list[str]) -> dict[str, Any]:
    """Everything, one after another on one cluster."""
    with tempfile.TemporaryDirectory() as name, started_cluster("create_latency", 1, 2, leftovers) as cluster:
        image = Path(name) / "image.raw"
        with image.open("wb") as file:
            os.truncate(file.fileno(), IMAGE_BYTES)
        cluster.agents[0].publish(IMAGE, image)
        cluster.agents[1].create("first", IMAGE)  # attaches the image
        settled_places(cluster, IMAGE)
        say(f"creating {rounds} disks each way")
        seconds = bare_processes(rounds)
        seconds |= {"agent": at_the_agent(cluster, rounds), "command_line": by_command_line(cluster, rounds)}
    return {name: spread(values) for name, values in seconds.items()}


@click.command(context_settings=SETTINGS)
@click.option("--rounds", type=click.IntRange(min=1), default=100, show_default=True, help="Disks to create each way.")
def main(rounds: int) -> None:
    """Time the create of VMs' disks on a host that has the image.

    Writes build/create_latency.json and prints a table.

    \b
    Examples:
      python -m benchmarks.create_latency
      python -m benchmarks.create_latency --rounds 20
    """
    with benchmark():
        leftovers: list[str] = []
        seconds = measure(rounds, leftovers)
        within = {
            "agent": seconds["agent"]["median"] < AGENT_BAR_S,
            "command_line": seconds["command_line"]["median"] < CLI_BAR_S,
        }
        print_table(
            f"Create of a VM's disk, {rounds} times each; bars: {AGENT_BAR_S * 1000:.0f} ms at the agent,"
            f" {CLI_BAR_S * 1000:.0f} ms by the command line",
            ["ms", "min", "median", "p95", "max"],
            [
                [name.replace("_", " "), *(f"{times[which] * 1000:.1f}" for which in ("min", "median", "p95", "max"))]
                for name, times in seconds.items()
            ],
        )
        finish("create_latency", {"seconds": seconds, "median_within_bar": within}, leftovers)


if __name__ == "__main__":
    main()
