"""Which blocks a thin volume has itself, and in which two volumes differ, by the pool's metadata.

The metadata of a pool in use change. So the kernel is asked to hold a state of them (Linux: admin-guide/device-mapper/
thin-provisioning, reserve_metadata_snap), which thin_dump(8) and thin_delta(8) read. A pool holds one such state at a
time, and a killed agent leaves it behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from xml.parsers import expat  # the XML is of thin_dump and thin_delta

from drivers.base import Range
from drivers.host.command import OnLine, run
from drivers.kernel import devmapper, dmioctl
from drivers.kernel.devmapper import SECTOR
from drivers.snapshot.ranges import append

_TIMEOUT = 600.0
"""Seconds: a large volume on a slow disk has gigabytes of metadata."""

_HELD = 6
"""The word of a pool's status line that names the state held; "-" if there is none."""

_ATTRIBUTES = {
    "single_mapping": ("origin_block", ""), "range_mapping": ("origin_begin", "length"),
    "different": ("begin", "length"), "left_only": ("begin", "length"), "right_only": ("begin", "length"),
}  # fmt: skip
"""Elements that name blocks, with the attributes of the first block and of the number of blocks."""


def mapped(meta: Path, number: int) -> list[Range]:
    """The blocks that a volume has itself in the state held. Raises CommandFailed, CommandTimedOut, ToolMissing."""
    return _run(["thin_dump", "-m", "--dev-id", str(number), str(meta)])


def differing(meta: Path, number: int, since: int) -> list[Range]:
    """The blocks that two volumes do not share in the state held. Raises as ``mapped``."""
    return _run(["thin_delta", "-m", "--thin1", str(since), "--thin2", str(number), str(meta)])


@contextmanager
def held(pool: str) -> Iterator[None]:
    """Have the kernel hold the present state of the metadata. Calls come one at a time.

    Raises CommandFailed, CommandTimedOut, OSError.
    """
    release(pool)
    devmapper.message(pool, "reserve_metadata_snap")
    try:
        yield
    finally:
        release(pool)


def release(pool: str) -> None:
    """Release a held state, if there is one. Raises CommandFailed, CommandTimedOut, OSError."""
    if dmioctl.status(pool).split()[_HELD : _HELD + 1] not in ([], ["-"]):  # the line of a failed pool is short
        devmapper.message(pool, "release_metadata_snap")


def _run(argv: list[str]) -> list[Range]:
    return parsed(lambda on_line: run(argv, timeout=_TIMEOUT, on_line=on_line))


def parsed(feed: Callable[[OnLine], object]) -> list[Range]:
    """The ranges in the output of thin_dump(8) or thin_delta(8). ``feed`` is called with what takes the lines.

    Elements are not kept: at worst there is one for each 64 KiB of a volume. Raises ExpatError if something is missing.
    """
    ranges: list[Range] = []
    block_bytes = 0

    def begin(tag: str, values: Mapping[str, str]) -> None:
        nonlocal block_bytes
        if tag == "superblock":
            block_bytes = int(values["data_block_size"]) * SECTOR
        elif tag in _ATTRIBUTES:
            first, count = _ATTRIBUTES[tag]
            append(ranges, Range(int(values[first]) * block_bytes, int(values.get(count, 1)) * block_bytes))

    parser = expat.ParserCreate()
    parser.StartElementHandler = begin

    def take(line: str) -> None:
        parser.Parse(f"{line}\n")

    feed(take)
    parser.Parse("", True)
    return ranges
