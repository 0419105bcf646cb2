"""Makes one fetch of reads of the same range that come at the same time.

Neither bcache nor dm-cache sees that a second reader misses what is just being fetched for the first: each fetches it.
Below them reads therefore go through pages in memory, where a second reader waits for a page that is being read::

    virtman-cacheonce-LABEL (multipath) -> loop devices -> virtman-cachefrom-LABEL -> parents

A loop device handles one request after the other, and on Debian 12 a request page by page (Linux: drivers/block/loop.c,
loop_process_work and lo_read_simple, which newer kernels have not). So there are several over the same device, whose
pages they share; each request goes to the one with the least to do. They are told that reads are random: then nothing
is fetched ahead (Linux: mm/readahead.c, page_cache_sync_ra).

No other way was found that makes one request of a miss and reads nothing else. Read-ahead of a loop device adds what
lies behind the miss. LIO's fileio over its loop fabric hands on whole requests, but its file has read-ahead, without
which the kernel goes page by page (page_cache_sync_ra). dm-ebs would do, and is not in Debian's cloud kernel. A queue
that joins waiting requests (``queue_depth`` 1) makes a miss over a late link wait twice.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import mmap
import os
import threading
from collections.abc import Iterable
from pathlib import Path

from drivers.host.descriptors import opened
from drivers.kernel import devmapper, loopdev, multipath

log = logging.getLogger(__name__)

MODULES = ("dm_multipath", "dm_queue_length")
"""What it needs of the kernel, besides loop devices."""

WIDTH = 16
"""Requests that are on their way at the same time: as many pages as LARGEST has, so that it takes no longer than one
page where each page is fetched by itself."""

LARGEST = 64 << 10
"""Bytes of the largest read of bcache and of a block of dm-cache."""

_TRIAL = "virtman-cachetrial"
_trying = threading.Lock()


def start(label: str, table: Iterable[str], sectors: int) -> Path:
    """The device through which to read what ``table`` describes; what is there already stays.

    Raises CommandFailed, OSError.
    """
    if not devmapper.exists(_once(label)):
        below = devmapper.create(_from(label), table, read_only=True)
        with loopdev.random_readers(below, WIDTH) as loops:
            line = multipath.table(sectors, [[devmapper.number(loop) for loop in loops]], "queue-length")
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
    return int(devmapper.counted(_from(label))[2]) * devmapper.SECTOR


def piece() -> int:
    """Bytes of the largest request that loses no time here: what is larger should be cut.

    Raises CommandFailed, OSError.
    """
    with _trying:
        return LARGEST if _hands_on_whole_requests() else mmap.PAGESIZE


@functools.cache
def _hands_on_whole_requests() -> bool:
    """Whether a loop device asks for all pages of a request at once. It is tried: no number of a release tells it,
    since what makes it so came to older kernels, too.

    Over a file in memory, and not over dm-zero, which refuses what is read for the pages in memory (Linux: REQ_RAHEAD).
    """
    with contextlib.ExitStack() as stack:
        memory = os.memfd_create(_TRIAL)
        stack.callback(os.close, memory)
        os.truncate(memory, LARGEST)
        [zeros] = stack.enter_context(loopdev.random_readers(Path(f"/proc/self/fd/{memory}"), 1))
        line = f"0 {LARGEST // devmapper.SECTOR} linear {zeros} 0"
        stack.callback(devmapper.remove, _TRIAL)
        below = devmapper.create(_TRIAL, [line], read_only=True)
        with loopdev.random_readers(below, 1) as [loop]:
            before = _requests(below)
            _read_directly(loop, LARGEST)
            asked = _requests(below) - before
    log.info("a loop device asks %d times for the %d pages of a request", asked, LARGEST // mmap.PAGESIZE)
    return asked == 1


def _requests(device: Path) -> int:
    """How many reads a device has had since the start."""
    return int(devmapper.counters(device).read_text().split()[0])


def _read_directly(device: Path, size: int) -> None:
    with opened(device, os.O_DIRECT) as fd, mmap.mmap(-1, size) as memory:
        os.preadv(fd, [memory], 0)


def free(label: str) -> None:
    """Give the memory back, when the cache has what was fetched. Raises OSError."""
    with opened(source(label)) as fd:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _once(label: str) -> str:
    return f"virtman-cacheonce-{label}"


def _from(label: str) -> str:
    return f"virtman-cachefrom-{label}"
