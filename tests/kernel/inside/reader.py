"""``reader.py PATH SEED BYTES START SECONDS``: read a disk in a guest and compare it from START on with SEED's bytes.

It reads chunks in random order past the page cache, at least once and until the time is over. After a wrong byte or an
I/O error the exit code is not 0.
"""

from __future__ import annotations

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
    """Read and compare."""
    wanted, buffer = content(seed, int(size)), mmap.mmap(-1, CHUNK)
    chunks, order = range(int(start), int(size), CHUNK), random.Random(path)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    end = time.monotonic() + float(seconds)
    try:
        while True:
            for offset in order.sample(chunks, len(chunks)):
                os.preadv(fd, [buffer], offset)
                READY.touch()
                if buffer[:] != wanted[offset : offset + CHUNK]:
                    sys.exit(f"wrong bytes at {offset}")
            if time.monotonic() >= end:
                break
    finally:
        os.close(fd)
        READY.unlink(missing_ok=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
