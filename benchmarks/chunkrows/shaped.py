"""One boot at its recorded pace on hosts that really are apart: links of 1 Gbit/s or 100 Mbit/s that answer late.

The boot is that of a VM's disk, without the VM: the reads and the pauses between them are those of the recorded one.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.boot_wave import checksum
from benchmarks.chunkrows import boots
from benchmarks.chunkrows.boots import Boot
from benchmarks.chunkrows.images import image_folder, random_file
from benchmarks.chunkrows.scale import Job
from benchmarks.chunkrows.table import Line, at_most, not_measured
from benchmarks.disks import exported, local_disks
from benchmarks.errors import Failed, WrongBytes
from benchmarks.figures import percentile
from benchmarks.hosts import settled_places, started_cluster
from benchmarks.nbdreplay import NbdDisk
from benchmarks.processes import say
from drivers.chunkstore.control import Control
from lab.cluster import network_names
from lab.errors import NoNetwork
from lab.network import GIGABIT, Network

IMAGE, VM, OTHER = "img", "vm", "other"
ROUND_TRIP = 0.001
COLD_BAR, PREFETCH_BAR = 1.02, 1.01
SLOW_BAR, NEVER_SLOWER_BAR = 1.03, 1.0
BESIDE_BAR = 1.03

Begin = Callable[[Control], object]
"""What is asked of a host's chunk store when a boot begins there."""


@dataclass(frozen=True)
class Link:
    """``rate``: bits a second; ``round_trip``: seconds."""

    rate: int
    round_trip: float

    def __str__(self) -> str:
        """For people."""
        return f"{self.rate / GIGABIT:g} Gbit/s, {self.round_trip * 1000:g} ms"


def measure(job: Job) -> list[Line]:
    """Lines for both links."""
    with boots.recorded(job) as boot:
        local = percentile([local_boot(boot) for _ in range(job.scale.rounds)], 50)
        say(f"local file: {local:.2f} s")
        try:
            return _lines(job, boot, local)
        except NoNetwork as error:
            return [not_measured("one boot on slow links", f"{COLD_BAR}", error)]


def _lines(job: Job, boot: Boot, local: float) -> list[Line]:
    fast, slow = Link(GIGABIT, ROUND_TRIP), Link(GIGABIT // 10, ROUND_TRIP)
    levels = job.scale.levels_apart
    ranges = [(read.offset, read.offset + read.length) for read in boot.trace.reads]
    prefetch = partial(_fill, IMAGE, ranges)
    plain, filled = (_median(job, boot, levels, fast, begin) for begin in (_nothing, prefetch))
    slow_plain, slow_filled = (_median(job, boot, 1, slow, begin) for begin in (_nothing, prefetch))
    far, near = f"one boot, {levels} levels of namespaces, {fast}", f"one boot, one level, {slow}"
    return [
        at_most(f"{far}: cold, times a local file", COLD_BAR, plain["cold"] / local, _seconds(plain["cold"], local)),
        at_most(f"{far}: with prefetch", PREFETCH_BAR, filled["cold"] / local, _seconds(filled["cold"], local)),
        at_most(
            f"{near}: cold with prefetch, times warm", SLOW_BAR, slow_filled["cold"] / slow_filled["warm"],
            _seconds(slow_filled["cold"], slow_filled["warm"]),
        ),
        at_most(
            f"{near}: cold with prefetch, times without", NEVER_SLOWER_BAR, slow_filled["cold"] / slow_plain["cold"],
            _seconds(slow_filled["cold"], slow_plain["cold"]),
        ),
    ]  # fmt: skip


def _seconds(*values: float) -> str:
    return ", ".join(f"{value:.2f} s" for value in values)


def _nothing(_control: Control) -> None:
    """Reads alone bring what is here."""


def _fill(image: str, ranges: Sequence[tuple[int, int]], control: Control, *, idle: bool = False) -> None:
    control.call("fill", {"image": image, "ranges": ranges, "idle": idle})


def beside_hydration(job: Job) -> list[Line]:
    """A line: a cold boot while its host gets all of another image, by the same link."""
    link, size = Link(GIGABIT, ROUND_TRIP), job.scale.other
    what = f"one boot, one level, {link}: cold beside hydration of another image, times without"
    with boots.recorded(job) as boot, image_folder() as folder:
        other = random_file(folder / "other.raw", size)
        try:
            alone, beside = (
                _median(job, boot, 1, link, begin, other)["cold"]
                for begin in (_nothing, partial(_fill, OTHER, [(0, size)], idle=True))
            )
        except NoNetwork as error:
            return [not_measured(what, f"{BESIDE_BAR}", error)]
    return [at_most(what, BESIDE_BAR, beside / alone, _seconds(beside, alone))]


def _median(
    job: Job, boot: Boot, levels: int, link: Link, begin: Begin, other: Path | None = None
) -> Mapping[str, float]:
    """Seconds of a cold boot on fresh hosts, which begins with ``begin``, and of a warm one after it."""
    rounds = []
    for _ in range(job.scale.rounds):
        with _vm_apart(boot, levels, link, other) as (disk, control):
            rounds.append({"cold": _played(disk, boot, partial(begin, control)), "warm": _played(disk, boot)})
        say(f"{levels} levels, {link}: {_seconds(*rounds[-1].values())}")
    return {state: percentile([each[state] for each in rounds], 50) for state in rounds[0]}


@contextmanager
def _vm_apart(boot: Boot, levels: int, link: Link, other: Path | None) -> Iterator[tuple[Path, Control]]:
    """The socket of a VM's disk on the last of fresh hosts, and that host's chunk store.

    ``other``: an image that the last host attaches as well. Raises Failed, NoNetwork.
    """
    leftovers: list[str] = []
    network = Network(network_names(levels + 1), rate=link.rate, round_trip=link.round_trip)
    with (
        TemporaryDirectory(dir="/tmp", prefix="apart-") as folder,
        network,
        started_cluster("chunkstore-network", levels, 1, leftovers, network) as cluster,
    ):
        cluster.agents[0].publish(IMAGE, boot.image)
        nodes = [agent.create(f"{VM}-{number}", IMAGE).disk.blockdev for number, agent in enumerate(cluster.agents[1:])]
        if other is not None:
            cluster.agents[0].publish(OTHER, other)
            cluster.agents[levels].create(f"{VM}-{OTHER}", OTHER)
        where, last = settled_places(cluster, IMAGE), cluster.names[levels]
        if where[last].depth != levels:
            raise Failed(f"{last} is at level {where[last].depth}, not {levels}")
        with exported(Path(folder), {last: {VM: nodes[-1] or {}}}) as sockets:
            yield sockets[last], Control(cluster.run_folder(levels) / "chunkd.sock")
    if leftovers:
        raise Failed("; ".join(leftovers))


def local_boot(boot: Boot) -> float:
    """Seconds, from a VM's disk directly over the raw file."""
    with TemporaryDirectory(dir="/tmp", prefix="local-") as name:
        folder = Path(name)
        with exported(folder, local_disks(folder, boot.image, {"local": [VM]})) as sockets:
            return _played(sockets["local"], boot)


def _played(disk: Path, boot: Boot, begin: Callable[[], object] = lambda: None) -> float:
    """Seconds of the boot at its recorded pace; what ``begin`` takes counts as well. Raises DiskFailed, WrongBytes."""
    read_so_far, at = 0, 0.0
    with NbdDisk(disk, VM) as connection:
        began = time.monotonic()
        begin()
        for read in boot.trace.reads:
            time.sleep(max(0.0, read.at - at))
            read_so_far, at = zlib.crc32(connection.read(read.offset, read.length), read_so_far), read.at
        seconds = time.monotonic() - began
    if read_so_far != checksum(boot.image, boot.trace):
        raise WrongBytes("a boot read other bytes than the image has")
    return seconds
