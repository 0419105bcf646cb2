"""Threads that must not end unseen.

A watch, a heartbeat, a worker: when one of them dies, what it did is not done any more, and nothing else fails. So such
a thread is a ``Watch``: what ends it by an exception is logged and kept, and it begins again after a pause.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 30.0
"""Seconds before a thread that died begins again: twice as long after each death, unless it lived longer than that."""

_all: weakref.WeakSet[Watch] = weakref.WeakSet()
_guard = threading.Lock()


@dataclass(frozen=True)
class Death:
    """A thread of this process that died: how often, of what the last time, and whether it runs again."""

    thread: str
    times: int
    error: str
    running: bool


class Watch:
    """A daemon thread that calls ``act``, and again when it raises, until it returns or ``stopped`` is set."""

    def __init__(self, name: str, act: Callable[[], None], stopped: threading.Event | None = None) -> None:
        """Nothing runs yet. ``act`` returns when it was asked to; what is left open by one that raises is its own."""
        self._act = act
        self._stopped = stopped or threading.Event()
        self._times, self._error, self._running = 0, "", False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def name(self) -> str:
        return self._thread.name

    def start(self) -> None:
        """Begin. Raises OSError where the process may have no more threads, as the system does (pthread_create(3))."""
        with _guard:
            _all.add(self)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise OSError(errno.EAGAIN, str(error)) from error

    def is_alive(self) -> bool:
        """Whether it was started and has not returned."""
        return self._thread.is_alive()

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has returned, at most ``timeout`` seconds. It does not wait for itself."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)

    @property
    def death(self) -> Death | None:
        """How it died, if it ever did."""
        return Death(self.name, self._times, self._error, self._running) if self._times else None

    def _run(self) -> None:
        pause = 0.0
        while not self._stopped.is_set():
            self._running, began = True, time.monotonic()
            try:
                return self._act()
            except Exception as error:
                self._times, self._error, self._running = self._times + 1, repr(error), False
                pause = pause_after(pause, time.monotonic() - began)
                log.exception("thread %s died; it begins again in %.1f s", self.name, pause)
            self._stopped.wait(pause)
        return None


def pause_after(last: float, lived: float) -> float:
    """Seconds until a thread begins again that died after ``lived`` seconds, and ``last`` seconds the time before."""
    return FIRST_PAUSE if lived > LONGEST_PAUSE else min(2 * last or FIRST_PAUSE, LONGEST_PAUSE)


def deaths() -> list[Death]:
    """The threads of this process that died and are still wanted, by name."""
    with _guard:
        watches = list(_all)
    found = [watch.death for watch in watches if watch.is_alive()]
    return sorted((death for death in found if death), key=lambda death: death.thread)
