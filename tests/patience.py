"""How long tests that start programs wait. Guests of the kernel lab import it, too."""

from __future__ import annotations

import threading
from collections.abc import Callable

PATIENCE = 600.0
"""Seconds after which something is taken for one that hangs. No test is decided by how fast anything is: what takes a
second on an idle machine took fifty in a whole run on a busy one."""


def wait_until(condition: Callable[[], object], what: str = "what the test waits for") -> None:
    """Wait for what another thread, a program or the kernel does. Raises AssertionError, which names ``what``.

    The pauses grow with the wait, and they alone are counted: on a busy machine nobody polls all the time or gives up
    early.
    """
    waiting, waited = threading.Event(), 0.0
    while not condition():
        if waited > PATIENCE:
            raise AssertionError(f"still not after {PATIENCE:g} s: {what}")
        pause = min(0.01 + waited / 10, 0.5)
        waiting.wait(pause)
        waited += pause
