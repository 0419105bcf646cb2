"""What VMs read of an image while they boot: ranges of its bytes, put together from several hosts' boots."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

GRAIN = 64 << 10
"""Bytes: ranges begin and end at multiples of this."""

LONGEST = 1 << 30
"""Bytes of a boot set."""

MOST_TEXT = 64 << 10
"""Bytes of a boot set as JSON."""

MOST_BOOTS = 8
"""Hosts whose boots count. The first ones tell enough, and later ones would add what happens in no other boot."""

Ranges = Iterable[Sequence[int]]
"""Where each begins and ends."""


def merged(known: Ranges, new: Ranges) -> list[list[int]]:
    """What both have comes first, in the order of ``known``; then what only ``known`` has; then the rest."""
    old, fresh = (dict.fromkeys(islice(_grains(ranges), LONGEST // GRAIN)) for ranges in (known, new))
    both = [grain for grain in old if grain in fresh]
    rest = [grain for grain in (*old, *fresh) if grain not in old or grain not in fresh]
    return _joined([*both, *rest][: LONGEST // GRAIN])


def text_of(ranges: Ranges) -> str:
    """JSON of as many ranges, from the first one on, as have room."""
    parts: list[str] = []
    room = MOST_TEXT - 2
    for begin, end in ranges:
        part = json.dumps([begin, end])
        room -= len(part) + 1
        if room < 0:
            break
        parts.append(part)
    return f"[{','.join(parts)}]"


def _grains(ranges: Ranges) -> Iterator[int]:
    for begin, end in ranges:
        yield from range(begin // GRAIN, -(-end // GRAIN))


def _joined(grains: Iterable[int]) -> list[list[int]]:
    ranges: list[list[int]] = []
    for grain in grains:
        if ranges and ranges[-1][1] == grain * GRAIN:
            ranges[-1][1] += GRAIN
        else:
            ranges.append([grain * GRAIN, (grain + 1) * GRAIN])
    return ranges
