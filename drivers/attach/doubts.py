"""When a parent that does not answer reads is left, and for which other one.

It does not matter whether it is without power, hangs behind a connection that is well, or waits itself: it is left as
soon as another one answers a read in the meantime. If no other answers, the network may be silent for a moment, and
nothing is better: the connection stays. One that the kernel calls silent is left once it can be reached again, unless
TCP is about to try again: it may wait for as long as it has waited.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Collection, Sequence
from typing import Generic, Protocol, TypeVar

from drivers.attach.hangs import Hangs
from drivers.iscsi.lookout import STANDSTILL

log = logging.getLogger(__name__)

SILENCE, HANG = STANDSTILL, 1.25
"""Seconds without an answer to a read until a parent is doubted: one that acknowledges nothing, and one that does."""

INTERVAL, LEAST_INTERVAL = 0.25, 0.05
"""Seconds from one look at a parent that is doubted to the next, and the least between two: a look may wait for an
answer for as long."""

FIRST_SPREAD, SPREAD = 0.25, 0.75
"""Seconds over which hosts log in again whose parents were silent together: each first to the one that it reads by."""

SOON = 1.0
"""Seconds for which TCP is waited for, rather than a new login, which costs both ends."""

T = TypeVar("T")


class Signs(Protocol[T]):
    """What can be seen of parents."""

    def stands_still(self, parent: T, seconds: float) -> bool:
        """Whether none of the reads that it was asked for has come back for so long."""

    def reads(self, parent: T) -> int:
        """How many reads it has answered."""

    def first_that_answers(self, parents: Collection[T]) -> T | None:
        """Which of these answers a read first, if one does."""

    def is_silent(self, parent: T, seconds: float) -> bool:
        """Whether its host has acknowledged nothing for so long, though it was asked repeatedly."""

    def awaits_acknowledgement(self, parent: T) -> bool:
        """Whether its host owes an acknowledgement that a live one would have given."""

    def takes_connections(self, parent: T) -> bool:
        """Whether a new connection to it comes about."""

    def is_asked_again_within(self, parent: T, seconds: float) -> bool:
        """Whether TCP sends its host again by then what it has not acknowledged."""


class Leaving(Protocol[T]):
    """Whose parents are doubted."""

    def paths(self) -> Sequence[T]:
        """The parents that it is to read by, in this order. Another one is asked for no more, but its answers may be
        awaited.
        """

    def leave(self, parent: T, *, silent: bool) -> None:
        """End the connection. ``silent``: nothing was heard of its host for a while, as in a pause of the network."""


class Doubts(Generic[T]):
    """Those about one image's parents."""

    def __init__(
        self,
        image: str,
        signs: Signs[T],
        route: Leaving[T],
        hangs: Hangs[T],
        wait: Callable[[float], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``wait`` waits so many seconds, or until all is to end: then it says yes. ``clock`` in seconds."""
        self._image, self._signs, self._route, self._hangs, self._wait = image, signs, route, hangs, wait
        self._clock = clock

    def resolve(self, parent: T) -> None:
        """Return once a parent answers reads, or is left.

        One that is no path any more is left at once: only the change of the map's paths waits for its reads.
        """
        said = False
        while self._signs.stands_still(parent, SILENCE):
            began = self._clock()
            if parent not in self._route.paths():
                log.warning("image %s: %s does not answer, and is wanted no more", self._image, parent)
                self._route.leave(parent, silent=False)
                return
            trouble = self._trouble(parent)
            if trouble == _SILENT:
                self._hangs.note_silence()
            if trouble:
                if self._leave_if_better(parent, trouble):
                    return
                if not said:
                    log.warning("image %s: %s %s, and no other answers", self._image, parent, trouble)
                said = True
            if self._wait(max(LEAST_INTERVAL, INTERVAL - (self._clock() - began))):
                return

    def _trouble(self, parent: T) -> str:
        """What ails one that stands still; nothing if it may only be slow."""
        hangs = self._signs.stands_still(parent, HANG)
        # What TCP has sent meanwhile and nobody acknowledged is for the network, or for a host without power.
        if self._signs.is_silent(parent, SILENCE) or (hangs and self._signs.awaits_acknowledgement(parent)):
            return _SILENT
        return _HANGS if hangs else ""

    def _leave_if_better(self, parent: T, trouble: str) -> bool:
        """Whether it was left: another one answers a read while it does not, or it is reached by a new connection.

        After a pause of the network one may wait for parents of its own, which is no hang yet.
        """
        silent = trouble == _SILENT
        better = self._other_that_answers(parent, silent=silent)
        if better is not None and self._signs.stands_still(parent, SILENCE):
            log.warning("image %s: %s %s, and %s answers", self._image, parent, trouble, better)
            spared = silent or self._hangs.spare(parent)
            if not spared:
                self._hangs.note(parent)
            if not silent:
                self._hangs.note_heir(better, self._signs.reads(better))
            self._route.leave(parent, silent=spared)
            return True
        if silent and self._is_reached_again(parent):
            log.warning("image %s: %s was silent, and is reached again", self._image, parent)
            self._route.leave(parent, silent=True)
            return True
        return False

    def _other_that_answers(self, parent: T, *, silent: bool) -> T | None:
        """Another parent that answers a read now, and for which this one may be left."""
        others = set(self._route.paths()) - {parent}
        if not silent:
            others = set(self._hangs.successors(parent, others, self._signs.reads))
        return self._signs.first_that_answers([each for each in others if not self._signs.stands_still(each, SILENCE)])

    def _stays_silent(self, parent: T) -> bool:
        return self._signs.is_silent(parent, SILENCE) and not self._signs.is_asked_again_within(parent, SOON)

    def _is_reached_again(self, parent: T) -> bool:
        """Whether a silent parent takes new connections, and is silent still after a while, another on each host."""
        if not self._signs.takes_connections(parent) or not self._stays_silent(parent):
            return False
        spread = (0, FIRST_SPREAD) if self._route.paths()[:1] == [parent] else (FIRST_SPREAD, SPREAD)
        if self._wait(random.uniform(*spread)):  # noqa: S311
            return False
        return self._stays_silent(parent)


_SILENT, _HANGS = "is silent", "hangs"
