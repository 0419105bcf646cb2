"""Time that passes when a test says so."""

from __future__ import annotations


class Clock:
    """Seconds, as ``time.monotonic`` gives them; ``now`` may be those since 1970."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass. Who waits for it has to be woken."""
        self.now += seconds
