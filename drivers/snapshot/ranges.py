"""Sizes and ranges of disks, and which ranges a chain of qcow2 layers holds itself (qemu-img(1), map)."""

from __future__ import annotations

import json

from drivers.base import BlockNode, Range
from drivers.errors import BadDisk
from drivers.host.command import run

SECTOR = 512
"""Bytes. Sizes of disks are multiples of it."""

_TIMEOUT = 600.0
"""Seconds: qemu-img reads all tables of all layers."""


def require_size(vm: str, least: int, size: int) -> None:
    """Raise BadDisk if a disk cannot have ``size`` bytes, and at least ``least``."""
    if size < least or size % SECTOR or least % SECTOR:
        raise BadDisk(f"VM {vm}: {size} is not a disk size: a multiple of {SECTOR}, and at least {least}")


def append(ranges: list[Range], new: Range) -> None:
    """Append a range, or extend the last one if ``new`` follows it and is of its kind."""
    if ranges and (ranges[-1].offset + ranges[-1].length, ranges[-1].zeros) == (new.offset, new.zeros):
        last = ranges.pop()
        new = Range(last.offset, last.length + new.length, new.zeros)
    ranges.append(new)


def allocated(node: BlockNode) -> list[Range]:
    """What the layers of a node hold; the lowest of them has no backing. Raises CommandFailed, CommandTimedOut."""
    done = run(["qemu-img", "map", "--output=json", "json:" + json.dumps(node)], timeout=_TIMEOUT)
    ranges: list[Range] = []
    for extent in json.loads(done.stdout):
        if extent["present"]:
            append(ranges, Range(extent["start"], extent["length"], zeros=extent["zero"]))
    return ranges
