"""Which disks do not get on with their reads, by what the kernel counts of all disks in one file.

A disk that works gives back one read after the other. Reads under way of which none comes back for a while say that
who serves the disk hangs, or the way there, though the connection may be well.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

_FILE = Path("/proc/diskstats")
_MAJOR, _MINOR, _READS, _UNDER_WAY = 0, 1, 3, 11
"""Fields of a line (Linux: admin-guide/iostats)."""


@dataclass(frozen=True)
class Counts:
    """How many reads have come back since the disk is there, and how many requests are under way."""

    reads: int
    under_way: int


def counts() -> dict[str, Counts]:
    """Those of all disks, by number (``major:minor``). Raises OSError."""
    return parsed(_FILE.read_text())


def parsed(text: str) -> dict[str, Counts]:
    """What the kernel's file says."""
    lines = (line.split() for line in text.splitlines())
    return {f"{line[_MAJOR]}:{line[_MINOR]}": Counts(int(line[_READS]), int(line[_UNDER_WAY])) for line in lines}


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
