"""How long disks have had reads in flight without a completed one, by the kernel's counters.

A disk that works completes one read after the other. If none completes for a while, the disk's server hangs, or the
network, though the connection may be well.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection
from pathlib import Path

_READS, _UNDER_WAY = 0, 8
"""Fields of a disk's counters (Linux: block/stat)."""
_GONE = frozenset({errno.ENOENT, errno.ENODEV})
"""Errors of the counters of a disk that does not exist, or no longer."""


Counts = tuple[int, int]
"""Reads that a disk has completed, and requests that it has not."""


def read_counts(number: str) -> Counts | None:
    """The counts of a disk (``major:minor``); None without such a disk. Raises OSError without a free descriptor."""
    try:
        fields = Path(f"/sys/dev/block/{number}/stat").read_text().split()
    except OSError as error:
        if error.errno not in _GONE:
            raise
        return None
    return int(fields[_READS]), int(fields[_UNDER_WAY])


class StallClock:
    """Measures the stalls of disks by repeated reads of their counts."""

    def __init__(self, read: Callable[[str], Counts | None] = read_counts) -> None:
        """``read`` returns the counts of a disk by its number."""
        self._read = read
        self._seen: dict[str, tuple[Counts, float]] = {}

    def measure(self, numbers: Collection[str], now: float) -> dict[str, float]:
        """The seconds of each disk's stall at the time ``now``; 0 for a disk that is idle or works."""
        found = {number: counts for number in numbers if (counts := self._read(number)) is not None}
        self._seen = {number: (counts, self._begun(number, counts, now)) for number, counts in found.items()}
        return {number: now - begun for number, (_, begun) in self._seen.items()}

    def _begun(self, number: str, counts: Counts, now: float) -> float:
        """When the present stall of a disk began; now, if there is none."""
        (reads, under_way), begun = self._seen.get(number, ((0, 0), now))
        return begun if under_way and counts[1] and counts[0] == reads else now
