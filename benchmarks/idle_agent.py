"""What agents cost that have nothing to do: heartbeats at Volt for each interval, and processor time.

Three times in one cluster of an origin and a host: without any image; with images that nobody uses; and after these
were removed at Volt, while the origin still has them.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import httpx

from benchmarks.command import SETTINGS, benchmark, finish
from benchmarks.figures import MIB, print_table
from benchmarks.hosts import settled_places, started_cluster
from benchmarks.processes import cpu_seconds, say
from lab.cluster import Cluster

ORIGIN, HOST = 0, 1
BEATS_BAR, CORE_BAR = 1.3, 0.01
"""Heartbeats for each host and interval: agents come up to a fifth sooner, by chance. Part of a core for each agent."""


def heartbeats(cluster: Cluster) -> float:
    """Heartbeats that Volt has received so far."""
    text = httpx.get(f"{cluster.volt_url}/metrics", trust_env=False).text
    found = re.search(r"^volt_heartbeats_total (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def watch(cluster: Cluster, seconds: float) -> dict[str, float]:
    """Heartbeats for each host and interval, and the part of a core that each agent uses."""
    interval = cluster.volt.heartbeat(cluster.names[HOST], []).interval_s
    pids = {name: agent.status().pid for name, agent in zip(cluster.names, cluster.agents, strict=True)}
    beats, used = heartbeats(cluster), {name: cpu_seconds(pid) for name, pid in pids.items()}
    began = time.monotonic()
    time.sleep(seconds)
    took, beats = time.monotonic() - began, heartbeats(cluster) - beats
    cores = {name: (cpu_seconds(pid) - used[name]) / took for name, pid in pids.items()}
    return {"beats": beats / len(pids) / (took / interval), **cores}


def use_once(cluster: Cluster, images: int) -> list[str]:
    """Publish small images, each of which the host attaches for a VM that is destroyed again."""
    names = [f"image-{number}" for number in range(images)]
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            image = Path(folder) / name
            image.write_bytes(os.urandom(MIB))
            cluster.agents[ORIGIN].publish(name, image)
            cluster.agents[HOST].create("vm", name)
            cluster.agents[HOST].destroy("vm")
    for name in names:
        settled_places(cluster, name)
    return names


def measure(images: int, seconds: float, leftovers: list[str]) -> dict[str, dict[str, float]]:
    """All three, one after another."""
    with started_cluster("idle_agent", 1, 2, leftovers) as cluster:
        say(f"watching agents without images for {seconds:.0f} s")
        found = {"no image": watch(cluster, seconds)}
        names = use_once(cluster, images)
        say(f"watching agents with {images} images for {seconds:.0f} s")
        found[f"{images} images that nobody uses"] = watch(cluster, seconds)
        cluster.agents[HOST].gc()
        for name in names:
            cluster.volt.remove_image(name)
        say(f"watching agents whose {images} images were removed at Volt for {seconds:.0f} s")
        found[f"{images} images removed at Volt"] = watch(cluster, seconds)
        cluster.agents[ORIGIN].gc()
    return found


def within_bars(found: dict[str, Any]) -> bool:
    """Whether the agents beat as often as they should, and need no more of a processor than they may."""
    return all(
        row["beats"] <= BEATS_BAR and max(value for name, value in row.items() if name != "beats") <= CORE_BAR
        for row in found.values()
    )


@click.command(context_settings=SETTINGS)
@click.option("--images", type=click.IntRange(min=1), default=20, show_default=True, help="Images of each agent.")
@click.option(
    "--seconds", type=click.FloatRange(min=1), default=60.0, show_default=True, help="How long to watch each."
)
def main(images: int, seconds: float) -> None:
    """Watch agents that have nothing to do.

    Writes build/idle_agent.json and prints a table.

    \b
    Examples:
      python -m benchmarks.idle_agent
      python -m benchmarks.idle_agent --images 100 --seconds 30
    """
    with benchmark():
        leftovers: list[str] = []
        found = measure(images, seconds, leftovers)
        print_table(
            f"Idle agents; bars: {BEATS_BAR} heartbeats for each interval, {CORE_BAR:.0%} of a core",
            ["with", "heartbeats", "origin's core", "host's core"],
            [
                [name, f"{row['beats']:.2f}", f"{row['origin']:.2%}", f"{row['host-1']:.2%}"]
                for name, row in found.items()
            ],
        )
        finish("idle_agent", {"agents": found, "within_bars": within_bars(found)}, leftovers)


if __name__ == "__main__":
    main()
