"""A thousand connections to two hundred images: memory, and one image's reads while the others' parent hangs."""

from __future__ import annotations

import itertools
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
"""Of an image: its first chunk is read before the parent hangs, one of its second half meanwhile."""
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
        file = random_file(made.folder / "one.raw", 2 * scale.rounds * scale.samples * CHUNK)
        one = good.publish("one", file, [host.name])
        host.join(one, [good])
        disk = stack.enter_context(host.disk(one))
        crowd = [stack.enter_context(host.disk(others[n % len(others)])) for n in range(scale.connections - 1)]
        for each in crowd:
            each.read(0, CHUNK)
        memory = host.memory
        chunks = iter(random.Random(0).sample(range(file.stat().st_size // CHUNK), 2 * scale.rounds * scale.samples))
        waiting = crowd[: len(others)]
        rounds = [_round(number, disk, chunks, scale.samples, bad.pid, waiting) for number in range(scale.rounds)]
    what = f"{scale.connections} connections, {scale.images} images"
    return [
        Line(f"{what}: memory", f"below {MEMORY_BAR} MiB", f"{memory / MIB:.0f} MiB", memory < MEMORY_BAR * MIB),
        *(_compared(state, [each[state] for each in rounds]) for state in ("cold", "warm")),
    ]


def _round(
    number: int, disk: NbdDisk, chunks: Iterator[int], samples: int, parent: int, waiting: Sequence[NbdDisk]
) -> dict[str, tuple[float, float]]:
    """The p99 of cold and of warm reads, each before the parent of ``waiting`` hangs and meanwhile."""
    calm, rest = (list(itertools.islice(chunks, samples)) for _ in range(2))
    cold, warm = p99(disk, calm), p99(disk, calm)
    with hanging(parent, waiting, _SMALL // 2 + number * CHUNK):
        time.sleep(_REST_S)
        return {"cold": (cold, p99(disk, rest)), "warm": (warm, p99(disk, calm))}


def _compared(state: str, rounds: Sequence[tuple[float, float]]) -> Line:
    """By the round with the median ratio."""
    before, then = sorted(rounds, key=lambda each: each[1] / each[0])[len(rounds) // 2]
    what = f"p99 of one image while the others' parent hangs, times before: {state} reads of 4 KiB"
    return at_most(what, P99_BAR, then / before, _milliseconds(before, then))


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
def hanging(parent: int, disks: Sequence[NbdDisk], offset: int) -> Iterator[None]:
    """A parent that hangs, and a read of each disk, at ``offset``, that waits for it. All goes on afterwards."""
    os.kill(parent, signal.SIGSTOP)
    waiting = [threading.Thread(target=_read_chunk, args=[disk, offset], daemon=True) for disk in disks]
    try:
        for thread in waiting:
            thread.start()
        yield
    finally:
        os.kill(parent, signal.SIGCONT)
        for thread in waiting:
            thread.join()


def _read_chunk(disk: NbdDisk, offset: int) -> None:
    with suppress(DiskFailed):
        disk.read(offset, CHUNK)
