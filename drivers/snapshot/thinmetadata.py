"""Which blocks of a thin volume are its own, and in which two volumes differ: asked of the pool's metadata.

While a pool is in use its metadata change, so the kernel is asked to keep them as they are meanwhile (Linux:
admin-guide/device-mapper/thin-provisioning, reserve_metadata_snap); thin_dump(8) and thin_delta(8) read those. There is
one such state at a time in a pool, and a killed agent leaves it behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from xml.parsers import expat  # programs of ours wrote what is parsed

from drivers.base import Range
from drivers.host.command import run
from drivers.kernel import devmapper
from drivers.kernel.devmapper import SECTOR

_TIMEOUT = 600.0
"""Seconds: a large volume on a slow disk has gigabytes of metadata."""

_HELD = 6
"""The word of a pool's status line that says what is kept."""

_DIFFERENT = ("different", "left_only", "right_only")


class Blocks:
    """Takes what thin_dump(8) and thin_delta(8) write, line by line. ``ranges``: what it names; neighbours are one.

    No tree is made of it: at worst there is an element for each 64 KiB of a volume.
    """

    def __init__(self) -> None:
        self.ranges: list[Range] = []
        self._block = 0
        """Bytes of a block."""
        self._parser = expat.ParserCreate()
        self._parser.StartElementHandler = self._begin

    def feed(self, line: str) -> None:
        """The next line."""
        self._parser.Parse(f"{line}\n")

    def end(self) -> None:
        """There are no more. Raises ExpatError if something is missing."""
        self._parser.Parse("", True)

    def _begin(self, tag: str, attributes: Mapping[str, str]) -> None:
        if tag == "superblock":
            self._block = int(attributes["data_block_size"]) * SECTOR
        elif tag == "single_mapping":
            self._add(int(attributes["origin_block"]), 1)
        elif tag == "range_mapping":
            self._add(int(attributes["origin_begin"]), int(attributes["length"]))
        elif tag in _DIFFERENT:
            self._add(int(attributes["begin"]), int(attributes["length"]))

    def _add(self, begin: int, length: int) -> None:
        new = Range(begin * self._block, length * self._block)
        if self.ranges and self.ranges[-1].offset + self.ranges[-1].length == new.offset:
            new = Range(self.ranges[-1].offset, self.ranges.pop().length + new.length)
        self.ranges.append(new)


def mapped(meta: Path, number: int) -> list[Range]:
    """The blocks that a volume has itself in what is ``kept``. Raises CommandFailed, CommandTimedOut, ToolMissing."""
    return _asked(["thin_dump", "-m", "--dev-id", str(number), str(meta)])


def differing(meta: Path, number: int, since: int) -> list[Range]:
    """The blocks in which two volumes may differ: those that they do not share. As ``mapped``, which see."""
    return _asked(["thin_delta", "-m", "--thin1", str(since), "--thin2", str(number), str(meta)])


@contextmanager
def kept(pool: str) -> Iterator[None]:
    """Have the kernel keep the metadata as they are now. Calls come one at a time. Raises CommandFailed,
    CommandTimedOut.
    """
    release(pool)
    devmapper.message(pool, "reserve_metadata_snap")
    try:
        yield
    finally:
        release(pool)


def release(pool: str) -> None:
    """Let go of what a killed agent had the kernel keep. Raises CommandFailed, CommandTimedOut."""
    if devmapper.status(pool).split()[_HELD : _HELD + 1] not in ([], ["-"]):  # a pool that has failed says little
        devmapper.message(pool, "release_metadata_snap")


def _asked(argv: list[str]) -> list[Range]:
    blocks = Blocks()
    run(argv, timeout=_TIMEOUT, on_line=blocks.feed)
    blocks.end()
    return blocks.ranges
