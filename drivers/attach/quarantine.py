"""Parents that were left because they did not answer reads: for a minute they come after all others.

Such a parent may answer what its cache holds, and hang again at the next miss.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")

QUARANTINE = 60.0
"""Seconds."""


class Quarantine(Generic[T]):
    """The quarantined parents of one image. Several threads may use it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` in seconds."""
        self._clock = clock
        self._ends: dict[T, float] = {}

    def add(self, parent: T) -> None:
        """Begin the quarantine of a parent, or begin it anew."""
        self._ends[parent] = self._clock() + QUARANTINE

    def holds(self, parent: T) -> bool:
        return self._clock() < self._ends.get(parent, 0)

    def in_order(self, parents: Iterable[T]) -> list[T]:
        """The parents in their order, those in quarantine last."""
        return sorted(parents, key=self.holds)

    def ends(self) -> list[float]:
        """When, by the clock, each quarantine that still lasts ends."""
        now = self._clock()
        return [end for end in list(self._ends.values()) if end > now]
