"""Makes one fetch of reads of the same range that come at the same time.

Neither bcache nor dm-cache sees that a second reader misses what is just being fetched for the first: each fetches it.
Below them reads therefore go through pages in memory, where who wants a page that is on its way waits for it::

    virtman-cacheonce-LABEL (multipath) -> loop devices -> virtman-cachefrom-LABEL -> parents

A loop device handles one request after the other, and a request page by page (Linux: drivers/block/loop.c,
loop_process_work and lo_read_simple). So there are several over the same device, whose pages they share; each request
goes to the one with the least to do. They are told that reads are random: then nothing is fetched ahead (Linux:
mm/readahead.c, page_cache_sync_ra).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from pathlib import Path

from drivers.kernel import devmapper, loopdev

MODULES = ("dm_multipath", "dm_queue_length")
"""What it needs of the kernel, besides loop devices."""

WIDTH = 16
"""Requests that are on their way at the same time: as many pages as the largest read of bcache and a block of dm-cache
have, so that these take no longer than one page."""

PIECE = mmap.PAGESIZE
"""Bytes of a request that loses no time here; the pages of a larger one are fetched one after the other."""


def start(label: str, table: Iterable[str], sectors: int) -> Path:
    """The device through which to read what ``table`` describes; what is there already stays.

    Raises CommandFailed, OSError.
    """
    if not devmapper.exists(_once(label)):
        below = devmapper.create(_from(label), table, read_only=True)
        with loopdev.random_readers(below, WIDTH) as loops:
            paths = " ".join(f"{devmapper.number(loop)} 1" for loop in loops)
            line = f"0 {sectors} multipath 2 queue_mode bio 0 1 1 queue-length 0 {WIDTH} 1 {paths}"
            devmapper.create(_once(label), [line], read_only=True)
    return device(label)


def stop(label: str) -> None:
    """Remove it, whole or half made. Raises CommandFailed if it is in use."""
    devmapper.remove(_once(label))  # and with it the loop devices
    devmapper.remove(_from(label))


def device(label: str) -> Path:
    """The device to read by."""
    return devmapper.map_path(_once(label))


def source(label: str) -> Path:
    """The device whose pages are shared, and whose counters say what was fetched."""
    return devmapper.map_path(_from(label))


def fetched(label: str) -> int:
    """Bytes read from the parents since the start. Raises OSError."""
    return int(devmapper.counters(source(label)).read_text().split()[2]) * devmapper.SECTOR


def free(label: str) -> None:
    """Give the memory back, when the cache has what was fetched. Raises OSError."""
    fd = os.open(source(label), os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _once(label: str) -> str:
    return f"virtman-cacheonce-{label}"


def _from(label: str) -> str:
    return f"virtman-cachefrom-{label}"
