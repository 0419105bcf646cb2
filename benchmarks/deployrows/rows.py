"""The rows of the table of deployments: what is measured, and its bar."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks.boot_wave import checksum
from benchmarks.chunkrows import boots, scale
from benchmarks.chunkrows.images import random_file
from benchmarks.chunkrows.table import Line, at_most
from benchmarks.deployrows.copies import copies
from benchmarks.deployrows.scenes import IMAGE, Figures, Net, Scene, scene
from benchmarks.disks import exported
from benchmarks.errors import TookTooLong, WrongBytes
from benchmarks.figures import MIB
from benchmarks.hosts import host_status
from benchmarks.nbdreplay import Disk, replay
from benchmarks.processes import say

METHODS = ("tree", "lazy", "unicast", "bittorrent", "udpcast", "uftp", "auto")
BULK = ("tree", "bittorrent", "udpcast", "uftp")
SOURCE_BARS = {"tree": 2.05, "bittorrent": 3.0, "udpcast": 1.10, "uftp": 1.35}
FLOOR_BAR, LINK_BAR, FIRST_BAR, SLOW_BAR = 1.3, 1.02, 0.1, 1.5
AUTO_BAR, WORST_BAR, PREDICTED_BAR = 1.15, 2.0, 0.3


@dataclass(frozen=True)
class Job:
    """What to measure with. ``rate``: bits a second of each link. ``leftovers``: what clusters left."""

    hosts: int
    mib: int
    rate: int
    encrypt: bool
    methods: Sequence[str]
    cases: int
    seed: int
    folder: Path
    leftovers: list[str]

    def image(self, mib: int | None = None) -> Path:
        """A file of random bytes."""
        return random_file(self.folder / "image.raw", (mib or self.mib) * MIB)


def methods(job: Job) -> tuple[list[Figures], list[Line]]:
    """Each method to the same number of fresh hosts."""
    with scene(job.hosts, Net(job.rate), job.image(), job.leftovers) as cluster:
        found = list(cluster.all_methods(job.methods, encrypt=job.encrypt))
    lines = []
    for each in found:
        sent = f"{each.seconds:.1f} s, {each.sent / each.size:.3f} images sent by the source"
        if each.method == "tree":
            times = each.seconds / each.floor
            lines.append(at_most(f"tree, {job.hosts} hosts, times the floor", FLOOR_BAR, times, sent))
        if each.method in SOURCE_BARS:
            what = f"{each.method}, {job.hosts} hosts: bytes of the source's link, images"
            lines.append(at_most(what, SOURCE_BARS[each.method], each.sent / each.size))
    return found, lines


def baselines(job: Job) -> tuple[list[Figures], list[Line]]:
    """What people have without VirtMan."""
    found = copies(job.hosts, Net(job.rate), job.image(), job.folder)
    for each in found:
        say(", ".join(each.cells()))
    return found, []


def sites(job: Job) -> tuple[list[Figures], list[Line]]:
    """Half of the hosts in another site: what crosses the link between the two."""
    far = {f"host-{number}": "far" for number in range(job.hosts // 2 + 1, job.hosts + 1)}
    return _uplinks(job, far, job.methods, "two sites")


def racks(job: Job) -> tuple[list[Figures], list[Line]]:
    """Four racks: what crosses each uplink."""
    size = job.hosts // 4
    where = {f"host-{number}": f"r{(number - 1) // size + 1}" for number in range(1, 4 * size + 1)}
    return _uplinks(replace(job, hosts=4 * size), where, ("tree", "lazy"), f"4 racks of {size}")


def _uplinks(job: Job, where: dict[str, str], names: Sequence[str], what: str) -> tuple[list[Figures], list[Line]]:
    found, lines = [], []
    with scene(job.hosts, Net(job.rate, racks=where), job.image(), job.leftovers) as cluster:
        for method in names:
            before = _crossed(cluster)
            found.append(cluster.deploy(method))
            say(", ".join(found[-1].cells()))
            most = max(after - before[rack] for rack, after in _crossed(cluster).items()) / found[-1].size
            cluster.let_go()
            lines.append((method, most))
    return found, [
        at_most(f"{what}, {method}: images that cross a link between them", LINK_BAR, most) for method, most in lines
    ]


def _crossed(cluster: Scene) -> dict[str, int]:
    """By rack, the bytes that came into it, with the headers that a bridge sees."""
    return {rack: cluster.network.uplink_bytes(rack)[0] for rack in set(cluster.net.racks.values())}


def faults(job: Job) -> tuple[list[Figures], list[Line]]:
    """Lost packets, and one host whose link is ten times slower."""
    found, lines = [], []
    names = [name for name in ("udpcast", "uftp") if name in job.methods]
    plain: dict[str, Figures] = {}
    for net in (Net(job.rate), Net(job.rate, slow=("host-2",)), Net(job.rate, loss=0.01), Net(job.rate, loss=0.05)):
        with scene(job.hosts, net, job.image(), job.leftovers) as cluster:
            for each in cluster.all_methods(names, encrypt=job.encrypt):
                found.append(each)
                plain.setdefault(each.method, each)
                if net.slow:
                    times = each.median / plain[each.method].median
                    lines.append(at_most(f"{each.method}: a host in the middle beside a slow one", SLOW_BAR, times))
    return found, lines


def lost(job: Job) -> tuple[list[Figures], list[Line]]:
    """All of one host is killed when it has half of the image: what the others take then, beside no such loss."""
    found = []
    with scene(job.hosts, Net(job.rate), job.image(), job.leftovers) as cluster:
        for method in job.methods:
            [plain] = cluster.all_methods([method], encrypt=job.encrypt)
            hurt = cluster.lose(method, "host-2", encrypt=job.encrypt)
            say(", ".join(hurt.cells()))
            cluster.let_go()
            found += [plain, hurt]
    return found, []


def first(job: Job) -> tuple[list[Figures], list[Line]]:
    """The first VM that has read what its boot reads: lazily, and after the best bulk method."""
    with boots.recorded(scale.Job(scale.FULL, Path(), None)) as boot:
        image = _grown(boot.image, job.folder / "image.raw", job.mib * MIB)
        with scene(job.hosts, Net(job.rate), image, job.leftovers) as cluster:
            found = list(cluster.all_methods([name for name in BULK if name in job.methods]))
            lazy, moved = _lazy_boot(cluster, boot)
    best = min(found, key=lambda each: each.seconds)
    figures = f"{lazy:.1f} s; {best.method} {best.seconds:.1f} s"
    return found, [
        at_most("first VM, lazily: time, of the best bulk method", FIRST_BAR, lazy / best.seconds, figures),
        at_most("first VM, lazily: bytes, of the image", FIRST_BAR, moved / best.size, f"{moved / MIB:.0f} MiB"),
    ]


def _grown(image: Path, grown: Path, size: int) -> Path:
    """A copy with random bytes behind it, so that it has ``size`` bytes besides its holes."""
    shutil.copyfile(image, grown)
    with grown.open("ab") as file:
        for _ in range(max(0, size - image.stat().st_blocks * 512) // MIB):
            file.write(os.urandom(MIB))
    return grown


def _lazy_boot(cluster: Scene, boot: boots.Boot) -> tuple[float, int]:
    """Seconds until a VM on a fresh host has read all that its boot reads, and the bytes that the host fetched."""
    host, name = cluster.cluster.agents[1], cluster.cluster.names[1]
    begun = time.monotonic()
    node = host.create("vm", IMAGE).disk.blockdev or {}
    with exported(cluster.image.parent, {name: {"vm": node}}) as sockets:
        [done] = replay([Disk("vm", name, sockets[name], verify=True)], boot.trace.reads, think=0, limit=LIMIT).vms
    seconds = time.monotonic() - begun
    if done.checksum != checksum(boot.image, boot.trace):
        raise WrongBytes("the lazy boot read other bytes than the image has")
    return seconds, host_status(cluster.cluster, name, IMAGE).fetched_bytes


def auto(job: Job) -> tuple[list[Figures], list[Line]]:
    """Random cases: what auto chose, against the best of all methods."""
    dice = random.Random(job.seed)
    times, errors, found = [], [], []
    for number in range(job.cases):
        case = Case.drawn(dice, job)
        faster = case.run(job)
        found += faster
        chosen, best = faster[0], faster[-1]
        times.append(chosen.seconds / best.seconds)
        errors.append(abs(chosen.predicted.get(chosen.method, 0.0) / chosen.seconds - 1))
        expected = {method: round(seconds, 1) for method, seconds in chosen.predicted.items()}
        say(f"case {number + 1}: {case}: {_named(chosen)}; best: {_named(best)}; expected: {expected}")
    return found, [
        at_most(f"auto, {job.cases} cases: time of the best method, in the middle", AUTO_BAR, median(times)),
        at_most(f"auto, {job.cases} cases: time of the best method, at worst", WORST_BAR, max(times)),
        at_most(f"auto, {job.cases} cases: error of the predicted time, in the middle", PREDICTED_BAR, median(errors)),
    ]


def _named(one: Figures) -> str:
    return f"{one.method} {one.seconds:.1f} s"


@dataclass(frozen=True)
class Case:
    """A network and a deployment."""

    hosts: int
    mib: int
    loss: float
    round_trip: float
    encrypt: bool

    @classmethod
    def drawn(cls, dice: random.Random, job: Job) -> Case:
        """A random one, as large as the job at most."""
        return cls(
            hosts=dice.randint(1, job.hosts), mib=round(16 * (job.mib / 16) ** dice.random()),
            loss=dice.choice([0.0, 0.0, 0.01, 0.05]), round_trip=dice.choice([0.0, 0.0, 0.01, 0.05]),
            encrypt=dice.random() < 0.5,
        )  # fmt: skip

    def run(self, job: Job) -> list[Figures]:
        """What auto took, and then each method that was faster than all before it. Each has fresh hosts."""
        net = Net(job.rate, self.round_trip, self.loss)
        names = [name for name in job.methods if name != "auto" and (not self.encrypt or name in ENCRYPTED)]
        with scene(self.hosts, net, job.image(self.mib), job.leftovers) as cluster:
            faster = [cluster.deploy("auto", encrypt=self.encrypt)]
            for name in names:
                cluster.let_go()
                with suppress(TookTooLong):
                    found = cluster.race(name, faster[-1].seconds, encrypt=self.encrypt)
                    faster += [found] if found.seconds < faster[-1].seconds else []
        return faster


ENCRYPTED = ("tree", "lazy", "unicast", "uftp")
LIMIT = 600.0
"""Seconds for the reads of a boot."""
ROWS = {row.__name__: row for row in (methods, baselines, sites, racks, faults, lost, first, auto)}
