"""What was tried in vain, and is not tried again for a while."""

from __future__ import annotations

import math
import time
from collections.abc import Callable


def growing(times: int, first: float, longest: float) -> float:
    """Seconds of a rest after so many others: twice as long as the one before, and not longer than ``longest``."""
    # From some power on it is no float any more.
    return min(first * 2.0 ** min(times, 64), longest)


class Rests:
    """By name. Not for several threads at once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` in seconds."""
        self._clock = clock
        self._until: dict[str, float] = {}

    def begin(self, name: str, seconds: float) -> None:
        """It is not to be tried for so long."""
        self._until[name] = self._clock() + seconds

    def end(self, name: str) -> None:
        """It may be tried."""
        self._until.pop(name, None)

    def clear(self) -> None:
        """All may be tried."""
        self._until.clear()

    def lasts(self, name: str) -> bool:
        """Whether it is not to be tried yet."""
        return self._clock() < self._until.get(name, -math.inf)
