"""A thousand connections to two hundred images: memory, and one image's reads while the others' parent hangs."""

from __future__ import annotations

import os
import random
import resource
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from benchmarks.chunkrows.images import random_file
from benchmarks.chunkrows.scale import Job
from benchmarks.chunkrows.stores import Store, Stores, stores
from benchmarks.chunkrows.table import Line, at_most
from benchmarks.errors import DiskFailed
from benchmarks.figures import MIB, percentile
from benchmarks.nbdreplay import NbdDisk
from drivers.base import Image

MEMORY_BAR, P99_BAR = 300, 2.0
CHUNK = 64 << 10
_SMALL = 2 * MIB
"""Of an image: its first half is read before the parent hangs, its second half meanwhile."""
_FILES = 16384
_REST_S = 2.0
"""Seconds for the store to notice that a parent hangs: what it does then counts as well."""


def measure(job: Job) -> list[Line]:
    """Lines for memory, cold reads and warm reads. Raises BenchmarkError."""
    scale = job.scale
    allow_many_files()
    with stores() as made, ExitStack() as stack:
        good, bad, host = made.start("good"), made.start("bad"), made.start("host")
        others = _others(made, bad, host, scale.images - 1)
        file = random_file(made.folder / "one.raw", 2 * scale.samples * CHUNK)
        one = good.publish("one", file, [host.name])
        host.join(one, [good])
        disk = stack.enter_context(host.disk(one))
        crowd = [stack.enter_context(host.disk(others[n % len(others)])) for n in range(scale.connections - 1)]
        for each in crowd:
            each.read(0, CHUNK)
        memory = host.memory
        places = random.Random(0).sample(range(2 * scale.samples), 2 * scale.samples)
        calm, rest = places[: scale.samples], places[scale.samples :]
        cold, warm = p99(disk, calm), p99(disk, calm)
        with hanging(bad.pid, [crowd[n] for n in range(min(len(others), len(crowd)))]):
            time.sleep(_REST_S)
            cold_then, warm_then = p99(disk, rest), p99(disk, calm)
    what = f"{scale.connections} connections, {scale.images} images"
    meanwhile = "p99 of one image while the others' parent hangs, times before"
    return [
        Line(f"{what}: memory", f"below {MEMORY_BAR} MiB", f"{memory / MIB:.0f} MiB", memory < MEMORY_BAR * MIB),
        at_most(f"{meanwhile}: cold reads of 4 KiB", P99_BAR, cold_then / cold, _milliseconds(cold, cold_then)),
        at_most(f"{meanwhile}: warm reads of 4 KiB", P99_BAR, warm_then / warm, _milliseconds(warm, warm_then)),
    ]


def _milliseconds(before: float, then: float) -> str:
    return f"{before * 1000:.2f} ms, {then * 1000:.2f} ms"


def allow_many_files() -> None:
    """For this process, and for the stores that it starts: as the agent's unit does (LimitNOFILE)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


def _others(made: Stores, parent: Store, host: Store, number: int) -> list[Image]:
    """Small images that a host reads from a parent."""
    images = []
    for each in range(number):
        file = random_file(made.folder / f"other-{each}.raw", _SMALL)
        images.append(parent.publish(f"other-{each}", file, [host.name]))
        host.join(images[-1], [parent])
    return images


def p99(disk: NbdDisk, chunks: Sequence[int]) -> float:
    """Seconds of the slowest hundredth of reads, one in each of these chunks."""
    seconds = []
    for chunk in chunks:
        began = time.monotonic()
        disk.read(chunk * CHUNK, 4096)
        seconds.append(time.monotonic() - began)
    return percentile(seconds, 99)


@contextmanager
def hanging(parent: int, disks: Sequence[NbdDisk]) -> Iterator[None]:
    """A parent that hangs, and a read of each disk that waits for it. All goes on afterwards."""
    os.kill(parent, signal.SIGSTOP)
    waiting = [threading.Thread(target=_read_second_half, args=[disk], daemon=True) for disk in disks]
    try:
        for thread in waiting:
            thread.start()
        yield
    finally:
        os.kill(parent, signal.SIGCONT)
        for thread in waiting:
            thread.join()


def _read_second_half(disk: NbdDisk) -> None:
    with suppress(DiskFailed):
        disk.read(_SMALL // 2, CHUNK)
