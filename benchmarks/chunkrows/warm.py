"""Warm reads at one host, beside the version before, and beside qemu-nbd and nbdkit that serve the plain file."""

from __future__ import annotations

import socket
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import fio
from benchmarks.chunkrows.images import image_folder, random_file
from benchmarks.chunkrows.scale import GIB, Job
from benchmarks.chunkrows.table import Line, at_least, at_most
from benchmarks.chunkrows.versions import BEFORE, IMAGE, NOW, chain, checkouts
from benchmarks.errors import Failed
from benchmarks.figures import MIB, percentile
from benchmarks.processes import cpu_seconds, running, say
from lab.process import attempts
from lab.tools import run

_START_LIMIT = 10.0


@dataclass(frozen=True)
class Reads:
    """``share``: of the scale's number of reads. ``bar``: how many times as fast as before."""

    name: str
    request: int
    depth: int
    order: str
    share: float
    bar: float


ALL = (
    Reads("4 KiB, one at a time", 4096, 1, "randread", 1, 3),
    Reads("4 KiB, sixteen at a time", 4096, 16, "randread", 2, 3.5),
    Reads("1 MiB, in order", MIB, 1, "read", 0.1, 3),
)
LARGE = ALL[-1]
CPU_BAR = 1 / 3


@dataclass(frozen=True)
class Server:
    """Who serves the image at ``uri``. ``cpu``: seconds that it has used so far."""

    uri: str
    cpu: Callable[[], float]


@dataclass(frozen=True)
class Measured:
    """``rate``: reads a second; ``cpu``: seconds of the server for a GiB."""

    rate: float
    cpu: float


def measure(job: Job) -> list[Line]:
    """Lines for the ratios, and for all servers. Raises CommandFailed, Failed, ToolMissing."""
    found: dict[tuple[str, Reads], list[Measured]] = defaultdict(list)
    with servers(job) as running_servers:
        for server in running_servers.values():
            _read(server, LARGE, job, job.scale.warm // MIB)  # now it is warm
        for number in range(job.scale.rounds):
            for reads in ALL:
                for name, server in running_servers.items():
                    one = _read(server, reads, job, max(16, int(job.scale.warm_reads * reads.share)))
                    found[name, reads].append(one)
                    say(f"round {number + 1}, {reads.name}, {name}: {one.rate:.0f} reads/s, {one.cpu:.2f} s/GiB")
        return lines(found, list(running_servers))


def lines(found: dict[tuple[str, Reads], list[Measured]], names: Sequence[str]) -> list[Line]:
    """A line for each kind of reads, and one for the processor time."""
    rates = {key: percentile([each.rate for each in rounds], 50) for key, rounds in found.items()}
    cpu = {name: percentile([each.cpu for each in found[name, LARGE]], 50) for name in names}
    made = []
    for reads in ALL:
        all_rates = ", ".join(f"{name} {rates[name, reads]:,.0f}" for name in names)
        ratio = rates[NOW, reads] / rates[BEFORE, reads]
        made.append(
            at_least(f"warm reads, {reads.name}: times before", reads.bar, ratio, f"reads a second: {all_rates}")
        )
    seconds = ", ".join(f"{name} {cpu[name]:.2f}" for name in names)
    what = f"processor time per GiB, {LARGE.name}: times before"
    made.append(at_most(what, round(CPU_BAR, 2), cpu[NOW] / max(cpu[BEFORE], 0.001), f"seconds: {seconds}"))
    return made


@contextmanager
def servers(job: Job) -> Iterator[dict[str, Server]]:
    """All who serve the same image, side by side."""
    with ExitStack() as stack:
        folder = stack.enter_context(image_folder())
        image = random_file(folder / "image.raw", job.scale.warm)
        made: dict[str, Server] = {}
        for name, checkout in checkouts(job).items():
            hosts = stack.enter_context(chain(checkout, image, 1))
            made[name] = Server(f"nbd+unix:///{IMAGE}?socket={hosts.socket(1)}", lambda hosts=hosts: hosts.cpu(1))  # type: ignore[misc]
        sockets = Path(stack.enter_context(TemporaryDirectory(dir="/tmp", prefix="warm-")))
        for name, argv in plain_file(image, sockets).items():
            process = stack.enter_context(running(argv, stderr=subprocess.DEVNULL))
            _wait_for_listener(sockets / name)
            made[name] = Server(
                f"nbd+unix:///?socket={sockets / name}", lambda pid=process.pid: cpu_seconds(pid)  # type: ignore[misc]
            )  # fmt: skip
        yield made


def plain_file(image: Path, sockets: Path) -> dict[str, list[str]]:
    """Command lines of other NBD servers, by name; each listens in the folder under its name."""
    qemu = ["qemu-nbd", "--read-only", "--format=raw", "--shared=0", "--persistent", "--cache=writeback"]
    nbdkit = ["nbdkit", "--foreground", "--exit-with-parent", "--readonly", "--unix", str(sockets / "nbdkit")]
    return {
        "qemu-nbd": [*qemu, f"--socket={sockets / 'qemu-nbd'}", str(image)],
        "nbdkit": [*nbdkit, "file", str(image)],
    }


def _wait_for_listener(path: Path) -> None:
    for _ in attempts(_START_LIMIT):
        with socket.socket(socket.AF_UNIX) as sock:
            if sock.connect_ex(str(path)) == 0:
                return
    raise Failed(f"nobody listens at {path} after {_START_LIMIT:g} s")


def _read(server: Server, reads: Reads, job: Job, number: int) -> Measured:
    total = number * reads.request
    options = {"rw": reads.order, "bs": reads.request, "iodepth": reads.depth, "size": job.scale.warm}
    options |= {"io_size": total, "norandommap": 1, "randseed": 1}
    before = server.cpu()
    said = run(fio.command({"ioengine": "nbd", "thread": 1, "uri": server.uri, **options}))
    return Measured(fio.reads_per_second(said), (server.cpu() - before) * GIB / total)
