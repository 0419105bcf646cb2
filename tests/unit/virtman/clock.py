"""Time that passes when a test says so."""

from __future__ import annotations


class Clock:
    """Seconds, as ``time.monotonic`` gives them."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass. Who waits for it has to be woken."""
        self.now += seconds
