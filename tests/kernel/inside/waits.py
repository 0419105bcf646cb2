"""Waiting for what another thread or the kernel does, in a guest."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tests.patience import PATIENCE


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until it holds; AssertionError if it does not within PATIENCE."""
    waiting, pause, waited = threading.Event(), 0.02, 0.0
    while not condition():
        if waited > PATIENCE:
            raise AssertionError("it did not happen")
        waiting.wait(pause)
        waited += pause
        pause = min(2 * pause, 0.5)
