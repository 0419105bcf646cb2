"""Backing devices of bcache that have bcache's superblock in a file of ours, and nothing of it on the device.

bcache wants its superblock at the start of a backing device. So a backing device is a map of three parts: the
superblock, the data, and zeros before and behind the data, which are holes of the same file. They are no zero target:
with one, the map would take no discards (Linux: drivers/md/dm-zero.c).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from drivers.host.command import run
from drivers.kernel.bcachedev import SUPERBLOCK
from drivers.kernel.devmapper import SECTOR

SUPERBLOCK_AT = 16384
"""Bytes from the start of a header to bcache's superblock, which no probe of the header's loop device finds there."""

GUARD, GUARD_BEHIND = 8 << 20, 2 << 20
"""Bytes of zeros before and behind the data. When a bcache device begins to run, the kernel looks there for partitions
and udev for file systems; in the data that would wait for parents, and read what guests wrote. What is looked for
farthest from the start is 4 MiB behind it, and from the end 3087 sectors before it (libblkid: superblocks/luks.c,
superblocks/promise_raid.c)."""

START = (SUPERBLOCK + GUARD) // SECTOR
"""The sector of the map at which the data begin."""


def make_header(file: Path, block: int = SECTOR) -> None:
    """Make a header with a new identity, which no volume knows. ``block``: bytes of the smallest request.

    Raises CommandFailed, ToolMissing, OSError.
    """
    fresh = file.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    with fresh.open("wb") as opened:
        opened.truncate(SUPERBLOCK)
    run(["make-bcache", "-B", "--data-offset", str(SUPERBLOCK // SECTOR), "--block", str(block), str(fresh)])
    with fresh.open("r+b") as opened:
        superblock = opened.read(SUPERBLOCK)
        opened.seek(0)
        opened.write(bytes(SUPERBLOCK_AT) + superblock)
        opened.truncate(SUPERBLOCK_AT + SUPERBLOCK + GUARD + GUARD_BEHIND)
    fresh.rename(file)


def table(header: Path, data: Iterable[str], sectors: int) -> list[str]:
    """The table of a backing device. ``header``: the loop device of the file; ``data``: lines from ``START`` on."""
    first = SUPERBLOCK_AT // SECTOR
    return [
        f"0 {START} linear {header} {first}",
        *data,
        f"{START + sectors} {GUARD_BEHIND // SECTOR} linear {header} {first + START}",
    ]
