"""Which blocks of a thin volume are its own, and in which two volumes differ: asked of the pool's metadata.

While a pool is in use its metadata change, so the kernel is asked to keep them as they are meanwhile (Linux:
admin-guide/device-mapper/thin-provisioning, reserve_metadata_snap); thin_dump(8) and thin_delta(8) read those. There is
one such state at a time in a pool, and a killed agent leaves it behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree as ET

from drivers.base import Range
from drivers.host.command import run
from drivers.kernel import devmapper
from drivers.kernel.devmapper import SECTOR

_TIMEOUT = 600.0
"""Seconds: a large volume on a slow disk has gigabytes of metadata."""

_HELD = 6
"""The word of a pool's status line that says what is kept."""

_DIFFERENT = ("different", "left_only", "right_only")


def mapped(pool: str, meta: Path, number: int) -> list[Range]:
    """The blocks that a volume has itself. Raises CommandFailed, CommandTimedOut, ToolMissing."""
    with _kept(pool):
        root = _asked(["thin_dump", "-m", "--dev-id", str(number), str(meta)])
    block = _block(root)
    found = []
    for mapping in root.iterfind("device/*"):
        begin, length = mapping.get("origin_begin") or mapping.attrib["origin_block"], mapping.get("length", "1")
        found.append(Range(int(begin) * block, int(length) * block))
    return found


def differing(pool: str, meta: Path, number: int, since: int) -> list[Range]:
    """The blocks in which two volumes may differ: those that they do not share. Raises as ``mapped``."""
    with _kept(pool):
        root = _asked(["thin_delta", "-m", "--thin1", str(since), "--thin2", str(number), str(meta)])
    block = _block(root)
    parts = [part for part in root.iterfind("diff/*") if part.tag in _DIFFERENT]
    return [Range(int(part.attrib["begin"]) * block, int(part.attrib["length"]) * block) for part in parts]


def release(pool: str) -> None:
    """Let go of what a killed agent had the kernel keep. Raises CommandFailed, CommandTimedOut."""
    if devmapper.status(pool).split()[_HELD : _HELD + 1] not in ([], ["-"]):  # a pool that has failed says little
        devmapper.message(pool, "release_metadata_snap")


@contextmanager
def _kept(pool: str) -> Iterator[None]:
    release(pool)
    devmapper.message(pool, "reserve_metadata_snap")
    try:
        yield
    finally:
        release(pool)


def _asked(argv: list[str]) -> ET.Element:
    return ET.fromstring(run(argv, timeout=_TIMEOUT).stdout)  # noqa: S314  (a program of ours wrote it)


def _block(root: ET.Element) -> int:
    """Bytes of a block."""
    return int(root.attrib["data_block_size"]) * SECTOR
