"""Parents that were lost, and when others are told of them.

Volt gives the children of a host that was told to be lost to others. After a pause of the network all hosts reach their
parents again, and would have been given others: so of one that was left in silence nobody is told for a while. Volt
notices itself who is gone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from typing import Generic, TypeVar

RETURN_LIMIT = 30.0
"""Seconds that a parent which was left in silence has to be reached again, before it is told to be lost."""

T = TypeVar("T")


class Losses(Generic[T]):
    """Those of one image's parents. May be used by several threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` in seconds."""
        self._clock = clock
        self._lock = threading.Lock()
        self._silent: set[T] = set()
        self._untold: dict[T, float] = {}
        """From when on they are to be told of."""

    def note_silent(self, parent: T) -> None:
        """It is left because nothing was heard of its host."""
        with self._lock:
            self._silent.add(parent)

    def note(self, parent: T) -> None:
        """It is read from no more."""
        with self._lock:
            self._untold[parent] = self._clock() + (RETURN_LIMIT if parent in self._silent else 0)

    def note_back(self, parent: T) -> None:
        """It is read from again. What was silence is nothing to tell of then."""
        with self._lock:
            if parent in self._silent:
                self._silent.discard(parent)
                self._untold.pop(parent, None)

    def keep(self, parents: Collection[T]) -> None:
        """Only these are wanted now. Of others it is told as far as that is due."""
        now = self._clock()
        with self._lock:
            self._untold = {parent: at for parent, at in self._untold.items() if at <= now or parent in parents}
            self._silent &= set(parents)

    def take_due(self) -> list[T]:
        """Those to be told of now, once."""
        now = self._clock()
        with self._lock:
            due = [parent for parent, at in self._untold.items() if at <= now]
            self._untold = {parent: at for parent, at in self._untold.items() if at > now}
        return due
