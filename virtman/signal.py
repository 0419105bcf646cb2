"""What happens in one part of the agent, told to others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVarTuple

Ts = TypeVarTuple("Ts")


class Signal(Generic[*Ts]):
    """An event. Parts that are made before its listeners are given the signal, and call it."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[*Ts], object]] = []

    def connect(self, listener: Callable[[*Ts], object]) -> None:
        """Have a function called with each event. It must return at once."""
        self._listeners.append(listener)

    def __call__(self, *what: *Ts) -> None:
        """Tell all listeners."""
        for listener in self._listeners:
            listener(*what)
