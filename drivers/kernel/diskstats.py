"""Which disks do not get on with their reads, by what the kernel counts.

A disk that works gives back one read after the other. Reads under way of which none comes back for a while say that
who serves the disk hangs, or the way there, though the connection may be well.
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

_READS, _UNDER_WAY = 0, 8
"""Fields of a disk's file (Linux: block/stat)."""

_KNOWN = 1024
"""Disks of which something is remembered."""

_GONE = frozenset({errno.ENOENT, errno.ENODEV})
"""What is said of a disk's file that is not there, or was open when the disk went."""


@dataclass(frozen=True)
class Counts:
    """How many reads have come back since the disk is there, and how many requests are under way."""

    reads: int
    under_way: int


def counts(numbers: Iterable[str], read: Callable[[str], str]) -> dict[str, Counts]:
    """Those of these disks (``major:minor``) that are there. ``read`` tells what a file says.

    Raises OSError where this process has no room to look: that tells nothing of the disks.
    """
    found = {}
    for number in numbers:
        try:
            found[number] = parsed(read(file_of(number)))
        except OSError as error:
            if error.errno not in _GONE:
                raise
    return found


@functools.lru_cache(maxsize=_KNOWN)
def file_of(number: str) -> str:
    """Where the kernel counts for a disk."""
    return f"/sys/dev/block/{number}/stat"


@functools.lru_cache(maxsize=_KNOWN)
def parsed(text: str) -> Counts:
    """What a disk's file says. Those of idle disks say the same four times a second."""
    fields = text.split()
    return Counts(int(fields[_READS]), int(fields[_UNDER_WAY]))


class Standstill:
    """For how long each disk has had reads under way of which none came back, by looking at it again and again."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[Counts, float]] = {}

    def look(self, numbers: Collection[str], now: Mapping[str, Counts], at: float) -> dict[str, float]:
        """Seconds for each of these disks, 0 for one that gets on, or is idle. ``at``: the time of the look."""
        seen = {number: self._begun(number, now[number], at) for number in numbers if number in now}
        self._seen = {number: (now[number], begun) for number, begun in seen.items()}
        return {number: at - begun for number, begun in seen.items()}

    def _begun(self, number: str, counts: Counts, at: float) -> float:
        """Since when it stands still; now, if it does not."""
        before, begun = self._seen.get(number, (None, at))
        if before is None or not counts.under_way or not before.under_way or counts.reads != before.reads:
            return at
        return begun
