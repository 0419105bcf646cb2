"""What clones, snapshots and streams of a VM's disk cost on one host of the chunk store.

Clones: seconds and disk space of each, beside a copy of the private data. Snapshots: seconds to read the private data,
before there was any, with all of them, and when all are deleted again, in a random order. Streams: bytes of what
changed since a snapshot, and seconds to send and to receive, beside a copy of the private data.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from benchmarks.attach import timed
from benchmarks.command import SETTINGS, benchmark, finish
from benchmarks.figures import MIB, print_table, spread
from benchmarks.hosts import settled_places, started_cluster
from benchmarks.processes import say, tool
from lab.cluster import Cluster
from lab.tools import run
from virtman.client import AgentClient
from virtman.models import Vm

IMAGE, SOURCE = "lived", "source"
IMAGE_BYTES, PRIVATE_BYTES = 256 * MIB, 200 * MIB
CLONE_BAR_S, GROWTH_BAR_BYTES, READ_BAR, STREAM_BAR = 0.1, 100 * MIB, 1.1, 1.05
LARGE_BYTES, CHANGED_BYTES, PIECES = 1024 * MIB, 10 * MIB, 40
READS = 15
REQUEST = 64 << 10


def qemu_io(vm: Vm, command: str) -> None:
    """Do to a VM's disk what its QEMU would."""
    run([tool("qemu-io"), "-f", "qcow2", "-c", command, vm.disk.path])


def taken(folder: Path) -> int:
    """Bytes of disk space that a folder takes, each file counted once."""
    return int(run([tool("du"), "-s", "--block-size=1", str(folder)]).split()[0])


def clones(agent: AgentClient, source: Vm, count: int) -> dict[str, Any]:
    """Clone one at a time and then all by one call, destroy the source, and look at what the clones hold."""
    disks = _folder_of_layers(source)
    before = taken(disks)
    names = [f"clone-{number}" for number in range(count)]
    each = [timed(agent.clone, SOURCE, [name]) for name in names]
    growth = taken(disks) - before
    together = timed(agent.clone, SOURCE, [f"more-{number}" for number in range(count)])
    agent.destroy(SOURCE)
    for name in names:
        qemu_io(agent.vm(name), f"read -P 0x5a 0 {PRIVATE_BYTES}")  # fails if anything else is there
    return {"each_s": spread(each), "growth_bytes": growth, "by_one_call_s": together}


def copies(source: Vm, folder: Path, count: int) -> list[float]:
    """Seconds to copy the private data, which is what clones save."""
    seconds = []
    for _ in range(count):
        seconds.append(timed(shutil.copyfile, source.disk.path, folder / "copy"))
        (folder / "copy").unlink()
    return seconds


def snapshots(agent: AgentClient, vm: Vm, count: int) -> dict[str, Any]:
    """Seconds of each call, and of reading the private data."""
    reading = {"none": _reads(vm)}
    names = [f"point-{number}" for number in range(count)]
    take = []
    for number, name in enumerate(names):
        qemu_io(agent.vm(vm.name), f"write -P 0x5a {number * PRIVATE_BYTES // count // REQUEST * REQUEST} {MIB}")
        take.append(timed(agent.take_snapshot, vm.name, name))
    reading["all"] = _reads(agent.vm(vm.name))
    random.Random(4711).shuffle(names)
    delete = [timed(agent.delete_snapshot, vm.name, name) for name in names]
    reading["none_again"] = _reads(agent.vm(vm.name))
    return {
        "take_s": spread(take), "delete_s": spread(delete),
        "read_s": {when: statistics.median(seconds) for when, seconds in reading.items()},
    }  # fmt: skip


def _reads(vm: Vm) -> Sequence[float]:
    """Seconds of each pass over the private data, without those that QEMU takes to start."""
    requests = str(PRIVATE_BYTES // REQUEST)
    argv = [tool("qemu-img"), "bench", "-f", "qcow2", "-c", requests, "-s", str(REQUEST), vm.disk.path]
    return [float(run(argv).split("completed in ")[1].split()[0]) for _ in range(READS)]


def streams(agent: AgentClient, vm: Vm, folder: Path) -> dict[str, Any]:
    """Send and receive the private data, and then 10 MiB that changed in 40 places of a disk of 1 GiB."""
    agent.resize(vm.name, LARGE_BYTES)
    agent.take_snapshot(vm.name, "first")
    whole, changes = folder / "whole", folder / "changes"
    with whole.open("wb") as file:
        send = timed(partial(agent.send, snapshot="first"), vm.name, file)
    with whole.open("rb") as file:
        receive = timed(agent.receive, "received", IMAGE, file)
    for number in range(PIECES):
        length = CHANGED_BYTES // PIECES
        qemu_io(vm, f"write -P 0xa5 {number * LARGE_BYTES // PIECES // REQUEST * REQUEST} {length}")
    with changes.open("wb") as file:
        agent.send(vm.name, file, since="first")
    with changes.open("rb") as file:
        agent.receive("received", IMAGE, file)
    run([tool("qemu-img"), "compare", "-f", "qcow2", "-F", "qcow2", vm.disk.path, agent.vm("received").disk.path])
    sizes = {"whole_bytes": whole.stat().st_size, "since_bytes": changes.stat().st_size}
    for made in (whole, changes):
        made.unlink()
    agent.destroy("received")
    return {"send_s": send, "receive_s": receive, **sizes}


def _folder_of_layers(vm: Vm) -> Path:
    return next(folder for folder in Path(vm.disk.path).parents if folder.name == "snapshots") / ".layers"


def measure(count: int, points: int, leftovers: list[str]) -> dict[str, Any]:
    """Everything, one after another on one host."""
    with tempfile.TemporaryDirectory() as name, started_cluster("vm_life", 1, 2, leftovers) as cluster:
        agent = _host_with_image(cluster, Path(name))
        vm = _vm_with_data(agent, "other")
        say(f"taking and deleting {points} snapshots")
        figures = {"snapshots": snapshots(agent, vm, points)}
        agent.destroy("other")
        source = _vm_with_data(agent, "sent")
        say("sending and receiving")
        figures["streams"] = streams(agent, source, Path(name))
        agent.destroy("sent")
        source = _vm_with_data(agent, SOURCE)
        say(f"cloning {count} times, twice")
        figures["copy_s"] = spread(copies(source, Path(name), READS))
        return figures | {"clones": clones(agent, source, count)}


def _host_with_image(cluster: Cluster, folder: Path) -> AgentClient:
    image = folder / "image.raw"
    with image.open("wb") as file:
        os.truncate(file.fileno(), IMAGE_BYTES)
    cluster.agents[0].publish(IMAGE, image)
    cluster.agents[1].create("first", IMAGE)
    settled_places(cluster, IMAGE)
    return cluster.agents[1]


def _vm_with_data(agent: AgentClient, name: str) -> Vm:
    vm = agent.create(name, IMAGE)
    qemu_io(vm, f"write -P 0x5a 0 {PRIVATE_BYTES}")
    return vm


@click.command(context_settings=SETTINGS)
@click.option("--clones", "count", type=click.IntRange(min=1), default=100, show_default=True)
@click.option("--snapshots", "points", type=click.IntRange(min=1), default=50, show_default=True)
def main(count: int, points: int) -> None:
    """Time clones, snapshots and streams of a VM with 200 MiB of private data.

    Writes build/vm_life.json and prints a table.

    \b
    Examples:
      python -m benchmarks.vm_life
      python -m benchmarks.vm_life --clones 10 --snapshots 5
    """
    with benchmark():
        leftovers: list[str] = []
        figures = measure(count, points, leftovers)
        made, read = figures["clones"], figures["snapshots"]["read_s"]
        ratio = read["none_again"] / read["none"]
        stream, copy = figures["streams"], figures["copy_s"]["median"]
        within = {
            "clone": made["each_s"]["median"] < CLONE_BAR_S,
            "growth": made["growth_bytes"] < GROWTH_BAR_BYTES,
            "read": ratio <= READ_BAR,
            "since": figures["streams"]["since_bytes"] <= STREAM_BAR * CHANGED_BYTES,
        }
        print_table(
            f"{count} clones, {points} snapshots; bars: {CLONE_BAR_S * 1000:.0f} ms a clone,"
            f" {GROWTH_BAR_BYTES // MIB} MiB for all, reads {READ_BAR} times as long when all snapshots are gone,"
            f" {STREAM_BAR} bytes sent for one that changed",
            ["what", "median", "against"],
            [
                ["clone", f"{made['each_s']['median'] * 1000:.1f} ms",
                 f"{made['each_s']['median'] / figures['copy_s']['median']:.2f} of a copy"],
                [f"{count} clones by one call", f"{made['by_one_call_s'] * 1000:.0f} ms", ""],
                ["disk space of the clones", f"{made['growth_bytes'] / MIB:.1f} MiB", ""],
                ["send what changed", f"{stream['since_bytes'] / MIB:.2f} MiB",
                 f"{stream['since_bytes'] / CHANGED_BYTES:.3f} of the bytes"],
                ["send it all to a file", f"{stream['send_s']:.2f} s", f"{stream['send_s'] / copy:.1f} of a copy"],
                ["receive it", f"{stream['receive_s']:.2f} s", f"{stream['receive_s'] / copy:.1f} of a copy"],
                ["take a snapshot", f"{figures['snapshots']['take_s']['median'] * 1000:.1f} ms", ""],
                ["delete a snapshot", f"{figures['snapshots']['delete_s']['median'] * 1000:.1f} ms", ""],
                ["read with all snapshots", f"{read['all']:.3f} s", f"{read['all'] / read['none']:.2f} of without"],
                ["read when all are gone", f"{read['none_again']:.3f} s", f"{ratio:.2f} of without"],
            ],
        )  # fmt: skip
        finish("vm_life", {**figures, "within_bar": within}, leftovers)


if __name__ == "__main__":
    main()
