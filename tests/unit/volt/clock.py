"""A clock that tests move."""

from __future__ import annotations


class Clock:
    """Seconds since the epoch."""

    def __init__(self) -> None:
        """Some day in 2026."""
        self.time = 1_780_000_000.0

    def __call__(self) -> float:
        """The time now."""
        return self.time
