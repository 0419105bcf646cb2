"""The data path of the kernel stack: guests in a chain, with reads of a VM's disk at its ends."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks import fio
from benchmarks.errors import Failed
from benchmarks.figures import MIB, percentile
from benchmarks.kernellab import KernelLab, kernel_lab, usable_parents
from benchmarks.pathreads import ALL, LARGE, LEVELS, SINGLE, Measured, Reads, image_bytes, places
from benchmarks.processes import say
from lab.kernel.machine import Machine
from lab.kernel.services import agent

IMAGE, VM = "path", "vm"
DISK = f"/dev/mapper/virtman-vm-{VM}"
BARE = "/root/bare.raw"
_FILE = "/root/image.raw"
_CHECKED = 64 * MIB
_TICKS = 100  # of a second, in Debian's kernels: getconf CLK_TCK
_READY_LIMIT = 300.0
_LAYERS = ("virtman-cache-", "virtman-image-", "virtman-vm-")
_LAYER_ROUNDS = 3
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
        self._places = places()
        self._bare: dict[str, tuple[float, float]] = {}

    def prepare(self, size: int) -> None:
        """An image, a file for comparison, and the VMs, from the top down. Raises CommandFailed, AgentError."""
        origin = self._lab.machines["origin"]
        random = f"head -c {size} /dev/urandom > {_FILE}"
        origin.run(["sh", "-c", random])
        origin.run(["virtman", "publish", IMAGE, _FILE])
        reader = self._lab.hosts[0]
        reader.run(["sh", "-c", f"head -c {LARGE.room} /dev/urandom > {BARE} && sync {BARE}"])
        for host in self._lab.hosts:
            with agent(host) as client:
                client.create(VM, IMAGE)
        for level, host in enumerate(self._lab.hosts, start=1):
            above = self._above(level).name
            if usable_parents(host, IMAGE, 1, _READY_LIMIT)[0] != above:
                raise Failed(f"{host.name} does not read from {above}")
        for reads in ALL:
            self._bare[reads.name] = self._run(reader, BARE, reads, 0)
        self._idle_cpu = self._run(reader, BARE, Reads("one", 4096, 1, 1, 4096), 0)[1]

    def bare(self, reads: Reads) -> float:
        """Seconds of a request on a file of the host's own disk."""
        return self._bare[reads.name][0]

    def bare_cpu(self) -> float:
        """Seconds per GiB that a host's processor works for large reads of such a file."""
        return self._per_gib(self._bare[LARGE.name][1] - self._idle_cpu)

    def measure(self, delay: int) -> Iterator[Measured]:
        """All reads at all levels, with the links as late as that. Raises CommandFailed, Failed."""
        for level in LEVELS:
            for reads in ALL:
                place = next(self._places)
                for state in ("cold", "warm"):
                    yield self._measured(delay, level, state, reads, place)

    def layers(self) -> dict[str, float]:
        """Seconds of a warm small read at each device of the first level, from the bottom up; medians."""
        reader, place = self._lab.hosts[0], next(self._places)
        self._run(reader, DISK, SINGLE, place)
        names = reader.run(["dmsetup", "info", "--columns", "--noheadings", "--options", "name"]).split()
        devices = [name for begin in _LAYERS for name in sorted(names) if name.startswith(begin)]
        paths = {"a file of the host": (BARE, 0), **{name: (f"/dev/mapper/{name}", place) for name in devices}}
        found: dict[str, list[float]] = {name: [] for name in paths}
        for _ in range(_LAYER_ROUNDS):
            for name, (path, where) in paths.items():
                found[name].append(self._run(reader, path, SINGLE, where)[0])
        return {name: percentile(each, 50) for name, each in found.items()}

    def check(self) -> None:
        """See that the last host reads what the origin has. Raises Failed."""
        sums = [
            machine.run(["sh", "-c", f"head -c {_CHECKED} {path} | sha256sum"])
            for machine, path in ((self._lab.machines["origin"], _FILE), (self._lab.hosts[-1], DISK))
        ]
        if len(set(sums)) > 1:
            raise Failed("the last host reads something else than the origin has")

    def _above(self, level: int) -> Machine:
        return [self._lab.machines["origin"], *self._lab.hosts][level - 1]

    def _measured(self, delay: int, level: int, state: str, reads: Reads, place: int) -> Measured:
        child, parent = self._lab.hosts[level - 1], self._above(level)
        counted = reads is LARGE
        before = self._parent_and_requests(parent, child) if counted else (0.0, 0)
        seconds, cpu = self._run(child, DISK, reads, place)
        if not counted:
            return Measured(delay, level, state, reads.name, seconds, self.bare(reads), {})
        after = self._parent_and_requests(parent, child)
        used = {"child": cpu - self._idle_cpu, "parent": after[0] - before[0]}
        return Measured(
            delay, level, state, reads.name, seconds, self.bare(reads),
            {who: self._per_gib(value) for who, value in used.items()}, (after[1] - before[1]) / (reads.total / MIB),
        )  # fmt: skip

    @staticmethod
    def _per_gib(seconds: float) -> float:
        return max(0.0, seconds) * (1024 * MIB / LARGE.total)

    @staticmethod
    def _parent_and_requests(parent: Machine, child: Machine) -> tuple[float, int]:
        """Seconds that the parent has worked, and how many reads the child's iSCSI disks have had."""
        reads = sum(int(line.split()[0]) for line in child.run(["sh", "-c", _DISKS]).splitlines())
        return busy(parent.run(["head", "-n", "1", "/proc/stat"])), reads

    @staticmethod
    def _run(machine: Machine, path: str, reads: Reads, place: int) -> tuple[float, float]:
        """Seconds of a request, and seconds that the guest's processor worked in all."""
        command = fio.command({"filename": path, "ioengine": "libaio", **reads.options(place)})
        first, *said, last = machine.run(["sh", "-c", _BUSY, "busy", *command]).splitlines()
        return fio.read_seconds("\n".join(said), reads.depth), busy(last) - busy(first)


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
        release = json.loads(lab.hosts[0].run(["python3", "-c", _RELEASE]))
    return {"release": release, "bare_cpu": path.bare_cpu(), "measured": done, "layers": layers}


_RELEASE = (
    "import json, platform; print(json.dumps([platform.freedesktop_os_release()['VERSION'], platform.release()]))"
)
