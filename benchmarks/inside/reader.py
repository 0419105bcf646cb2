"""Read a disk past the page cache, one block after the other, at the pace of a disk in use.

``reader image DISK SECONDS FIRST STEP`` visits blocks FIRST, FIRST + STEP, ... of an image as
``benchmarks.inside.content`` makes it, each once, and compares every byte. ``reader control DISK SECONDS`` reads blocks
of another disk over and over, as the measure of how long this guest itself stands still.

The first line of the output comes when the reading begins. The last one is a JSON object: the requests as (time since
the epoch, seconds), the errors, the blocks with wrong bytes.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from collections.abc import Iterator

from benchmarks.inside.content import BLOCK, block

PACE_S = 0.02
_CONTROL_BLOCKS = 4096


def main(kind: str, disk: str, seconds: str, *visits: str) -> None:
    """Read for a time, and say how it went."""
    requests: list[tuple[float, float]] = []
    errors: list[str] = []
    wrong: list[int] = []
    buffer = mmap.mmap(-1, BLOCK)
    fd = os.open(disk, os.O_RDONLY | os.O_DIRECT)
    size = os.lseek(fd, 0, os.SEEK_END)
    print("reading", flush=True)
    end = time.monotonic() + float(seconds)
    for number in _visits(size // BLOCK, *visits):
        at, began = time.time(), time.monotonic()
        try:
            os.preadv(fd, [buffer], number * BLOCK)
        except OSError as error:
            errors.append(f"block {number}: {error.strerror}")
        requests.append((at, time.monotonic() - began))
        if kind == "image" and not errors and buffer[:] != block(number):
            wrong.append(number)
        if time.monotonic() > end:
            break
        time.sleep(PACE_S)
    print(json.dumps({"requests": requests, "errors": errors, "wrong": wrong}))


def _visits(blocks: int, first: str = "0", step: str = "") -> Iterator[int]:
    """Numbers of blocks; without a step the first few, for ever."""
    if step:
        yield from range(int(first), blocks, int(step))
    else:
        while True:
            yield from range(min(blocks, _CONTROL_BLOCKS))


if __name__ == "__main__":
    main(*sys.argv[1:])
