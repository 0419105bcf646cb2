"""Parents that hung: for how long they come behind the others, and which of the others a parent may be left for.

Such a parent may still answer what it has, and hang again: without a rest it would be left and taken back all the time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")

REST, LONGEST_REST = 60.0, 3600.0
"""Seconds of the first rest; each is twice as long as the one before, if that ended less than LONGEST_REST ago."""

LATELY = 10.0
"""Seconds after a silence in which a parent may wait for parents of its own, as after a pause of the network."""

SPARED = 3
"""How often in the time of a first rest a parent may do so, and not rest."""


class Hangs(Generic[T]):
    """Those of one image's parents. May be used by several threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` in seconds."""
        self._clock = clock
        self._rests: dict[T, tuple[float, float]] = {}
        """Until when a parent comes behind the others, and how long that is."""
        self._silence = -math.inf
        """When nothing was heard of the host of one of them last."""
        self._spared: dict[T, list[float]] = {}
        """When a parent that hung was let off without a rest."""
        self._heirs: dict[T, tuple[int, float]] = {}
        """Parents that took over from one that hung, how many reads they had answered by then, and until when that
        matters."""

    def note(self, parent: T) -> None:
        """It hung. Said again while it rests, that means nothing: what it was left for may come to light slowly."""
        if self.rests(parent):
            return
        now = self._clock()
        until, length = self._rests.get(parent, (now, 0.0))
        length = min(2 * length, LONGEST_REST) if length and now - until < LONGEST_REST else REST
        self._rests[parent] = now + length, length

    def note_silence(self) -> None:
        """Nothing is heard of the host of one that reads wait for: of the others, nobody knows yet."""
        self._silence = self._clock()

    def spare(self, parent: T) -> bool:
        """Whether it need not rest though it hangs, since a host was silent a moment ago.

        Said a few times, also after one silence, since several parents may wait for the same one in turn. One that is
        silent again and again is no better than one that hangs.
        """
        now = self._clock()
        lately = [at for at in self._spared.get(parent, ()) if now - at < REST]
        if now - self._silence > LATELY or len(lately) >= SPARED:
            return False
        self._spared[parent] = [*lately, now]
        return True

    def note_starting(self, parent: T) -> None:
        """It does not even greet, as one that starts. That ends when it greets, so no later rest is longer for it."""
        if self.rests(parent):
            return
        now = self._clock()
        _until, length = self._rests.get(parent, (now, 0.0))
        self._rests[parent] = now + REST, length

    def note_heir(self, parent: T, reads: int) -> None:
        """It takes over from one that hung, and has answered so many reads by now."""
        self._heirs[parent] = reads, self._clock() + REST

    def rests(self, parent: T) -> bool:
        """Whether it comes behind others."""
        return self._clock() < self._rests.get(parent, (-math.inf, 0))[0]

    def next_end(self) -> float:
        """Seconds until a parent has rested; infinite if none rests."""
        now = self._clock()
        return min((until - now for until, _ in list(self._rests.values()) if until > now), default=math.inf)

    def in_order(self, parents: Iterable[T]) -> list[T]:
        """In their order, but those that rest come last."""
        return sorted(parents, key=self.rests)

    def successors(self, parent: T, others: Iterable[T], reads: Callable[[T], int]) -> list[T]:
        """The others for which a parent that hangs may be left. ``reads``: how many one has answered by now.

        One that has answered nothing since it took over from a parent that hung lacks the same range as that, which all
        may wait for, as when the origin hangs: to leave them in turn would end sessions for ever. So it is left only
        for one that has neither hung nor taken over.
        """
        if not self._is_heir(parent, reads):
            return list(others)
        return [other for other in others if not self.rests(other) and not self._is_heir(other, reads)]

    def _is_heir(self, parent: T, reads: Callable[[T], int]) -> bool:
        """Whether it has taken over in the last minute, and has answered nothing since."""
        before, until = self._heirs.get(parent, (0, -math.inf))
        return self._clock() < until and reads(parent) <= before
