"""Ranges of a disk, and which of them a chain of qcow2 layers holds itself (qemu-img(1), map)."""

from __future__ import annotations

import json

from drivers.base import BlockNode, Range
from drivers.host.command import run

_TIMEOUT = 600.0
"""Seconds: qemu-img reads all tables of all layers."""


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
