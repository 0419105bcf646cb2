"""Which ranges of a disk a chain of layers holds itself (qemu-img(1), map)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from drivers.base import BlockNode, Range
from drivers.host.command import run

_TIMEOUT = 600.0
"""Seconds: it reads all tables of all layers."""


def allocated(node: BlockNode) -> list[Range]:
    """What the layers of a node hold; the lowest of them has no backing. Raises CommandFailed, CommandTimedOut."""
    done = run(["qemu-img", "map", "--output=json", "json:" + json.dumps(node)], timeout=_TIMEOUT)
    return list(_joined(json.loads(done.stdout)))


def _joined(extents: list[dict[str, Any]]) -> Iterator[Range]:
    """The extents that are present; neighbours of one kind, which may be of different layers, are one."""
    last: Range | None = None
    for extent in extents:
        if not extent["present"]:
            continue
        new = Range(extent["start"], extent["length"], zeros=extent["zero"])
        if last is not None and (last.offset + last.length, last.zeros) == (new.offset, new.zeros):
            last = Range(last.offset, last.length + new.length, last.zeros)
            continue
        if last is not None:
            yield last
        last = new
    if last is not None:
        yield last
