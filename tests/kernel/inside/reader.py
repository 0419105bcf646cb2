"""``reader.py PATH SEED BYTES START SECONDS``: read a disk in a guest and compare it from START on with SEED's bytes.

It reads chunks in random order past the page cache, again and again until the time is over, and prints a JSON object:
how many ``reads``, and the ``worst`` one in seconds. After a wrong byte or an I/O error the exit code is not 0.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import sys
import time
from pathlib import Path

CHUNK = 64 << 10
READY = Path("/run/reader-reads")
"""Is there from the first read on."""


def content(seed: str, size: int) -> bytes:
    """What the image holds that is made of this seed."""
    return random.Random(seed).randbytes(size)


def main(path: str, seed: str, size: str, start: str, seconds: str) -> None:
    """Read, compare, print."""
    wanted, buffer = content(seed, int(size)), mmap.mmap(-1, CHUNK)
    chunks, order = range(int(start), int(size), CHUNK), random.Random(path)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    worst, reads, end = 0.0, 0, time.monotonic() + float(seconds)
    try:
        while reads == 0 or time.monotonic() < end:
            for offset in order.sample(chunks, len(chunks)):
                began = time.monotonic()
                os.preadv(fd, [buffer], offset)
                worst, reads = max(worst, time.monotonic() - began), reads + 1
                READY.touch()
                if buffer[:] != wanted[offset : offset + CHUNK]:
                    sys.exit(f"wrong bytes at {offset}")
    finally:
        os.close(fd)
        READY.unlink(missing_ok=True)
    print(json.dumps({"reads": reads, "worst": worst}))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
