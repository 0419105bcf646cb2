"""Ranges of an image that hosts lack, as few as fit into a message."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

MOST_RANGES = 64
"""Of what a host lacks, and of what travels."""


def united(parts: Iterable[Iterable[Sequence[int]]]) -> list[list[int]]:
    """What any of these ranges have, in order, as at most ``MOST_RANGES``: the nearest ones are joined."""
    found: list[list[int]] = []
    for begin, end in sorted((begin, end) for part in parts for begin, end in part):
        if found and begin <= found[-1][1]:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([begin, end])
    too_many = len(found) - MOST_RANGES
    if too_many <= 0:
        return found
    widest = sorted(after[0] - before[1] for before, after in pairwise(found))[too_many - 1]
    joined = [found[0]]
    for begin, end in found[1:]:
        if too_many > 0 and begin - joined[-1][1] <= widest:
            joined[-1][1] = end
            too_many -= 1
        else:
            joined.append([begin, end])
    return joined
