"""The data path of the kernel stack: guests in a chain, with reads of a VM's disk at its ends."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks import fio
from benchmarks.command import EXPECTED
from benchmarks.errors import Failed
from benchmarks.figures import MIB, percentile
from benchmarks.kernellab import KernelLab, kernel_lab, usable_parents
from benchmarks.pathreads import ALL, LARGE, LEVELS, SINGLE, Measured, Places, Reads, cold_and_warm, image_bytes
from benchmarks.processes import say
from lab.kernel.machine import Machine
from lab.kernel.services import agent
from lab.kernel.storage import Storage

IMAGE, VM = "path", "vm"
DISK = f"/dev/mapper/virtman-vm-{VM}"
BARE = "/root/bare.raw"
_FILE = "/root/image.raw"
_CHECKED = 64 * MIB
_TICKS = 100  # of a second, in Debian's kernels: getconf CLK_TCK
_READY_LIMIT = 300.0
_CUT = "virtman-cachesplit-"
"""What lies over the cache's own device, which has no map."""
_LAYERS = (_CUT, "virtman-cache-", "virtman-image-", "virtman-vm-")
_LAYER_ROUNDS = _SUMS_ROUNDS = 3
SUMS = ("None", "CRC32C")
"""As iSCSI calls them (RFC 7143, section 13.1)."""
_IDLE = 10
"""Seconds for which hosts are watched at rest."""
_BUSY = 'head -n 1 /proc/stat; "$@"; head -n 1 /proc/stat'
_DISKS = "cat /sys/block/sd*/stat"


def busy(line: str) -> float:
    """Seconds that a guest's processor has worked, by the first line of /proc/stat (proc(5))."""
    user, nice, system, _idle, _wait, interrupts, soft = (int(word) for word in line.split()[1:8])
    return (user + nice + system + interrupts + soft) / _TICKS


class Path:
    """A chain of guests with a VM's disk at each level."""

    def __init__(self, lab: KernelLab) -> None:
        self._lab = lab
        self._places = Places()
        self._bare_cpu: list[float] = []

    def prepare(self, size: int) -> None:
        """An image, a file for comparison, and the VMs, from the top down. Raises CommandFailed, AgentError."""
        origin = self._lab.machines["origin"]
        random = f"head -c {size} /dev/urandom > {_FILE}"
        origin.run(["sh", "-c", random])
        origin.run(["virtman", "publish", IMAGE, _FILE, "--in-place"])
        reader = self._lab.hosts[0]
        reader.run(["sh", "-c", f"head -c {LARGE.room} /dev/urandom > {BARE} && sync {BARE}"])
        for host in self._lab.hosts:
            agent(host).create(VM, IMAGE)
        for level, host in enumerate(self._lab.hosts, start=1):
            above = self._above(level).name
            if usable_parents(host, IMAGE, 1, _READY_LIMIT)[0] != above:
                raise Failed(f"{host.name} does not read from {above}")
        # The second time fio itself need not be read from the disk.
        self._fio_cpu = [self._run(reader, BARE, Reads("one", 4096, 1, 1, 4096), 0).cpu for _ in range(2)][-1]
        self._at_rest = {host.name: _at_rest(host) for host in (origin, *self._lab.hosts)}

    def bare_cpu(self) -> float:
        """Seconds per GiB that a host's processor works for large reads of a file of its own disk; the median."""
        return percentile(self._bare_cpu, 50)

    def measure(self, delay: int) -> Iterator[Measured]:
        """All reads at all levels, with the links as late as that. Raises CommandFailed, Failed."""
        for level in LEVELS:
            for reads in ALL:
                yield from cold_and_warm(self._places, reads, partial(self._measured, delay, level, reads))

    def layers(self) -> dict[str, float]:
        """Seconds of a warm small read at each device of the first level, from the bottom up; medians."""
        reader, place = self._lab.hosts[0], self._places.take(SINGLE)
        self._run(reader, DISK, SINGLE, place)
        loop = reader.run(["losetup", "--find", "--show", "--direct-io=on", "--read-only", BARE]).strip()
        try:
            paths = {"a file of the host": (BARE, 0), "a loop device over it": (loop, 0)}
            paths |= {name: (path, place + begin) for name, (path, begin) in self._devices(reader).items()}
            found: dict[str, list[float]] = {name: [] for name in paths}
            for _ in range(_LAYER_ROUNDS):
                for name, (path, where) in paths.items():
                    found[name].append(self._run(reader, path, SINGLE, where).seconds)
        finally:
            reader.run(["losetup", "--detach", loop])
        return {name: percentile(each, 50) for name, each in found.items()}

    @staticmethod
    def _devices(reader: Machine) -> dict[str, tuple[str, int]]:
        """The devices by which a VM's disk is read, the cache's first, and at which of its bytes the image begins."""
        names = reader.run(["dmsetup", "info", "--columns", "--noheadings", "--options", "name"]).split()
        maps = {
            name: (f"/dev/mapper/{name}", 0) for begin in _LAYERS for name in sorted(names) if name.startswith(begin)
        }
        [cut] = [name for name in maps if name.startswith(_CUT)]
        below = reader.run(["dmsetup", "deps", "--options", "blkdevname", cut])
        guard = int(reader.run(["dmsetup", "table", cut]).split()[-1]) * 512
        inside = dict.fromkeys(re.findall(r"\((bcache\w+)\)", below))
        return {**{f"{name}, the cache": (f"/dev/{name}", guard) for name in inside}, **maps}

    def sums(self) -> dict[str, dict[str, float]]:
        """What reads of a disk take that another guest serves by iSCSI alone, without and with CRC32C; medians.

        Seconds of a request, and seconds of both processors per GiB. Raises CommandFailed, Failed.
        """
        reader, storage = self._lab.hosts[0], Storage(self._lab.machines["origin"])
        storage.serve(LARGE.room)
        try:
            rounds = [(sums, self._with_sums(reader, storage, sums)) for _ in range(_SUMS_ROUNDS) for sums in SUMS]
        finally:
            storage.withdraw()
        found: dict[str, dict[str, float]] = {}
        for sums in SUMS:
            each = [figures for what, figures in rounds if what == sums]
            found[sums] = {name: percentile([figures[name] for figures in each], 50) for name in each[0]}
        return found

    def _with_sums(self, reader: Machine, storage: Storage, sums: str) -> dict[str, float]:
        storage.log_in(reader, {f"node.conn[0].iscsi.{part}Digest": sums for part in ("Header", "Data")})
        try:
            # Its name has colons, at which fio divides names.
            disk = reader.run(["readlink", "--canonicalize", str(storage.device)]).strip()
            single = self._run(reader, disk, SINGLE, 0)
            (worked, began), large, (worked_then, end) = (
                _worked(storage.machine), self._run(reader, disk, LARGE, 0), _worked(storage.machine)
            )  # fmt: skip
        finally:
            storage.log_out(reader)
        rest = (end - began) * self._at_rest[storage.machine.name]
        return {
            SINGLE.name: single.seconds, LARGE.name: large.seconds,
            "child": self._per_gib(large.cpu - self._fio_cpu), "parent": self._per_gib(worked_then - worked - rest),
        }  # fmt: skip

    def check(self) -> None:
        """See that the last host reads what the origin has, at the beginning and at the end. Raises Failed."""
        for part in ("head", "tail"):
            sums = [
                machine.run(["sh", "-c", f"{part} -c {_CHECKED} {path} | sha256sum"])
                for machine, path in ((self._lab.machines["origin"], _FILE), (self._lab.hosts[-1], DISK))
            ]
            if len(set(sums)) > 1:
                raise Failed("the last host reads something else than the origin has")

    def _bare(self, reads: Reads) -> float:
        """Seconds of a request on a file of a host's own disk, now."""
        ran = self._run(self._lab.hosts[0], BARE, reads, 0)
        if reads is LARGE:
            self._bare_cpu.append(self._per_gib(ran.cpu - self._fio_cpu))
        return ran.seconds

    def _above(self, level: int) -> Machine:
        return [self._lab.machines["origin"], *self._lab.hosts][level - 1]

    def _measured(self, delay: int, level: int, reads: Reads, state: str, place: int) -> Measured:
        child, parent, bare = self._lab.hosts[level - 1], self._above(level), self._bare(reads)
        counted = reads is LARGE
        requests, worked, began = (_requests(child), *_worked(parent)) if counted else (0, 0.0, 0.0)
        ran = self._run(child, DISK, reads, place)
        if not counted:
            return Measured(delay, level, state, reads.name, ran.seconds, bare, {})
        worked_then, end = _worked(parent)
        used = {
            "child": ran.cpu - self._fio_cpu,
            "parent": worked_then - worked - (end - began) * self._at_rest[parent.name],
        }
        return Measured(
            delay, level, state, reads.name, ran.seconds, bare,
            {who: self._per_gib(value) for who, value in used.items()},
            (_requests(child) - requests) / (reads.total / MIB),
        )  # fmt: skip

    @staticmethod
    def _per_gib(seconds: float) -> float:
        return seconds * (1024 * MIB / LARGE.total)

    @staticmethod
    def _run(machine: Machine, path: str, reads: Reads, place: int) -> Ran:
        command = fio.command({"filename": path, "ioengine": "libaio", **reads.options(place)})
        first, *said, last = machine.run(["sh", "-c", _BUSY, "busy", *command]).splitlines()
        return Ran(fio.read_seconds("\n".join(said), reads.depth), busy(last) - busy(first))


@dataclass(frozen=True)
class Ran:
    """``seconds`` of a request; ``cpu``: seconds that the guest's processor worked in all."""

    seconds: float
    cpu: float


def _worked(machine: Machine) -> tuple[float, float]:
    """Seconds that a guest's processor has worked, and since when it runs (proc(5), uptime)."""
    stat, uptime = machine.run(["sh", "-c", "head -n 1 /proc/stat; cat /proc/uptime"]).splitlines()
    return busy(stat), float(uptime.split()[0])


def _at_rest(machine: Machine) -> float:
    """Which part of a guest's processor works while nobody reads."""
    (before, began), _, (after, end) = _worked(machine), machine.run(["sleep", str(_IDLE)]), _worked(machine)
    return (after - before) / (end - began)


def _requests(machine: Machine) -> int:
    """How many reads its iSCSI disks have had."""
    return sum(int(line.split()[0]) for line in machine.run(["sh", "-c", _DISKS]).splitlines())


@contextmanager
def late(machines: Sequence[Machine], milliseconds: int) -> Iterator[None]:
    """Within it an answer by the private network takes so much longer, half of it each way. Raises CommandFailed."""
    if not milliseconds:
        yield
        return
    rule = ["dev", "eth1", "root", "netem", "delay", f"{milliseconds * 500}us", "limit", "100000"]
    try:
        for machine in machines:
            machine.run(["tc", "qdisc", "add", *rule])
        yield
    finally:
        for machine in machines:
            machine.run(["tc", "qdisc", "del", "dev", "eth1", "root"])


def measure(suite: str, delays: Sequence[int], leftovers: list[str]) -> dict[str, Any]:
    """All reads with all delays, in guests of a release. Raises CommandFailed, Failed."""
    with kernel_lab("data_path", max(LEVELS), ["VOLT_FANOUT=1"], leftovers, suite=suite) as lab:
        path = Path(lab)
        say("publishing, attaching, and measuring the bare file")
        path.prepare(image_bytes(len(delays) + 1))
        done: list[Measured] = []
        for delay in delays:
            with late(list(lab.machines.values()), delay):
                for each in path.measure(delay):
                    done.append(each)
                    say(f"kernel: {', '.join(each.row())}")
        layers = path.layers()
        path.check()
        say("measuring what CRC32C takes")
        try:
            sums = path.sums()
        except EXPECTED as error:
            leftovers.append(f"what CRC32C takes: {error}")
            sums = {}
        release = json.loads(lab.hosts[0].run(["python3", "-c", _RELEASE]))
    return {"release": release, "bare_cpu": path.bare_cpu(), "measured": done, "layers": layers, "sums": sums}


_RELEASE = (
    "import json, platform; print(json.dumps([platform.freedesktop_os_release()['VERSION'], platform.release()]))"
)
