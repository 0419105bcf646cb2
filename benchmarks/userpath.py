"""The data path of the chunk store: hosts in a chain on this machine, with reads of a VM's disk at its ends.

Its hosts reach each other by TCP and TLS, which nothing delays.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import fio
from benchmarks.disks import BlockNode, exported
from benchmarks.errors import Failed
from benchmarks.figures import MIB, percentile
from benchmarks.hosts import chunk_store, settled_places, started_cluster
from benchmarks.nbdreplay import NbdDisk
from benchmarks.pathreads import LEVELS, PARALLEL, SINGLE, Measured, Places, Reads, cold_and_warm, image_bytes
from benchmarks.processes import cpu_seconds, say
from lab.cluster import Cluster
from lab.process import processes_of
from lab.tools import run

IMAGE = "path"
_BARE = "bare"
_LAYER_ROUNDS = 3
LARGE = Reads("1 MiB", MIB, 1, 128, 128 * MIB)
"""So many that hundredths of a second tell what they take of a processor."""
ALL = (SINGLE, PARALLEL, LARGE)


class Chain:
    """Hosts in a chain with a VM's disk on each, opened as by a QEMU; ``sockets`` are where they are read."""

    def __init__(self, cluster: Cluster, sockets: dict[str, Path]) -> None:
        self._cluster, self._sockets = cluster, sockets
        self._places = Places()

    def measure(self) -> Iterator[Measured]:
        """All reads at all levels. Raises CommandFailed, Failed."""
        for level in LEVELS:
            for reads in ALL:
                yield from cold_and_warm(self._places, reads, partial(self._measured, level, reads))

    def bare_cpu(self) -> float:
        """Seconds per GiB that a storage daemon works for large reads of the raw file."""
        before = self._disk_cpu(_BARE)
        self._run(self._sockets[_BARE], _BARE, LARGE, 0)
        return per_gib(self._disk_cpu(_BARE) - before)

    def layers(self) -> dict[str, float]:
        """Seconds of a warm small read at each layer of the first level, from the bottom up; medians."""
        host, place = self._cluster.names[1], self._places.take(SINGLE)
        self._run(self._sockets[host], host, SINGLE, place)
        served = self._cluster.run_folder(1) / "serve" / f"{IMAGE}.sock"
        ways = {
            "the raw file by a storage daemon": (self._sockets[_BARE], _BARE),
            "the host's chunk store": (served, IMAGE),
            "the VM's disk": (self._sockets[host], host),
        }
        found: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(_LAYER_ROUNDS):
            for name, (server, export) in ways.items():
                found[name].append(self._run(server, export, SINGLE, place))
        return {name: percentile(each, 50) for name, each in found.items()}

    def _measured(self, level: int, reads: Reads, state: str, place: int) -> Measured:
        host, above = self._cluster.names[level], self._cluster.names[level - 1]
        bare = self._run(self._sockets[_BARE], _BARE, reads, 0)
        before = self._cpu(host) + self._disk_cpu(host), self._cpu(above)
        seconds = self._run(self._sockets[host], host, reads, place)
        after = self._cpu(host) + self._disk_cpu(host), self._cpu(above)
        used = dict(zip(("child", "parent"), (b - a for a, b in zip(before, after, strict=True)), strict=True))
        cpu = {who: per_gib(value) for who, value in used.items()} if reads is LARGE else {}
        return Measured(0, level, state, reads.name, seconds, bare, cpu)

    def _cpu(self, host: str) -> float:
        return cpu_seconds(chunk_store(self._cluster, host))

    def _disk_cpu(self, disk: str) -> float:
        server = self._sockets[disk]
        [pid] = [pid for pid, line in processes_of(server.parent).items() if f"addr.path={server}," in line]
        return cpu_seconds(pid)

    @staticmethod
    def _run(server: Path, export: str, reads: Reads, place: int) -> float:
        uri = f"nbd+unix:///{export}?socket={server}"
        said = run(fio.command({"ioengine": "nbd", "thread": 1, "uri": uri, **reads.options(place)}))
        return fio.read_seconds(said, reads.depth)


def per_gib(seconds: float) -> float:
    """Of what the large reads took."""
    return seconds * (1024 * MIB / LARGE.total)


@contextmanager
def chain(leftovers: list[str]) -> Iterator[Chain]:
    """An image of random bytes, with all hosts attached. Raises CommandFailed, Failed."""
    with (
        ExitStack() as stack,
        started_cluster("data_path_user", max(LEVELS), 1, leftovers) as cluster,
    ):
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dp-", dir="/tmp")))
        image = folder / "image.raw"
        with image.open("wb") as file:
            for _ in range(image_bytes(2, ALL) // MIB):
                file.write(os.urandom(MIB))
        cluster.agents[0].publish(IMAGE, image)
        disks: dict[str, dict[str, BlockNode]] = {
            _BARE: {_BARE: {"driver": "raw", "file": {"driver": "file", "filename": str(image), "aio": "io_uring"}}}
        }
        for host, client in zip(cluster.names[1:], cluster.agents[1:], strict=True):
            disks[host] = {host: client.create(host, IMAGE).disk.blockdev or {}}
        where = settled_places(cluster, IMAGE)
        for level, host in enumerate(cluster.names[1:], start=1):
            if where[host].depth != level:
                raise Failed(f"{host} is at level {where[host].depth}, not {level}")
        sockets = dict(stack.enter_context(exported(folder, disks)))
        for name, server in sockets.items():
            NbdDisk(server, name).close()
        yield Chain(cluster, sockets)


def measure(leftovers: list[str]) -> dict[str, Any]:
    """All reads. Raises CommandFailed, Failed."""
    with chain(leftovers) as hosts:
        done = []
        for each in hosts.measure():
            done.append(each)
            say(f"chunkstore: {', '.join(each.row())}")
        return {"bare_cpu": hosts.bare_cpu(), "measured": done, "layers": hosts.layers()}
