"""``bootset HOW SIZE REQUEST MODE DISK...``: read the same pseudo-random ranges of an image from each of these disks.

HOW is ``turn`` or ``together``; SIZE the image's, REQUEST a read's bytes; MODE ``direct`` goes past the page cache,
``buffered`` through it. Every byte is compared. The output is a JSON object: the bytes of the ranges, those that each
disk was asked for by the kernel, which reads ahead, and the disks with wrong bytes.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import sys
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.inside.content import BLOCK, block

BOOT_SET = 40 << 20
_UNIT = 64 << 10  # what ranges are made of, so that no cache has to fetch more than it is asked for
_LONGEST = 16
_SECTOR = 512


def ranges(size: int) -> list[tuple[int, int]]:
    """Offset and length of each, in the order of the reads: the same for all. No two overlap."""
    chance = random.Random(size)
    free, found, left = set(range(size // _UNIT)), [], BOOT_SET // _UNIT
    while left:
        first = chance.randrange(size // _UNIT)
        length = min(chance.randint(1, _LONGEST), left)
        units = set(range(first, first + length))
        if units <= free:
            free -= units
            left -= length
            found.append((first * _UNIT, length * _UNIT))
    return found


def requests(size: int, most: int) -> Iterator[tuple[int, int]]:
    """Offset and length of each read, none longer than ``most``."""
    for start, length in ranges(size):
        for offset in range(start, start + length, most):
            yield offset, min(most, start + length - offset)


def wanted(size: int) -> int:
    """The checksum of the boot set."""
    found = 0
    for start, length in ranges(size):
        for number in range(start // BLOCK, (start + length) // BLOCK):
            found = zlib.crc32(block(number), found)
    return found


def read(disk: str, size: int, most: int, flags: int) -> int:
    """The checksum of what a disk has as boot set."""
    buffer, found = mmap.mmap(-1, most), 0
    fd = os.open(disk, os.O_RDONLY | flags)
    try:
        for offset, length in requests(size, most):
            view = memoryview(buffer)[:length]
            if os.preadv(fd, [view], offset) != length:
                raise EOFError(disk)
            found = zlib.crc32(view, found)
            view.release()
    finally:
        os.close(fd)
    return found


def bytes_read(disk: Path) -> int:
    """What a block device was asked for since it is there (Linux: Documentation/block/stat.rst)."""
    number = disk.stat().st_rdev
    stat = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/stat").read_text()
    return int(stat.split()[2]) * _SECTOR


def main(how: str, size: str, request: str, mode: str, *disks: str) -> None:
    """Read, and say how it went."""
    flags = os.O_DIRECT if mode == "direct" else 0
    before = {disk: bytes_read(Path(disk)) for disk in disks}
    with ThreadPoolExecutor(len(disks) if how == "together" else 1) as pool:
        sums = dict(zip(disks, pool.map(lambda disk: read(disk, int(size), int(request), flags), disks), strict=True))
    asked = [bytes_read(Path(disk)) - before[disk] for disk in disks]
    right = wanted(int(size))
    wrong = [disk for disk in disks if sums[disk] != right]
    print(json.dumps({"boot_set": BOOT_SET, "asked": asked, "wrong": wrong}))


if __name__ == "__main__":
    main(*sys.argv[1:])
