"""Work that nobody waits for: repairs, new assignments, reports.

One job per key at a time; a job asked for again while it runs is run once more after it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from drivers.errors import DriverError
from virtman.errors import VirtmanError

log = logging.getLogger(__name__)

Job = Callable[[], object]

STOP_GRACE = 3.0
"""Seconds that running jobs get to finish when the agent ends. Being cut off must be safe for every job."""


class Workers:
    """A pool of threads. A job's error is logged; whoever asked for it asks again when it still matters."""

    def __init__(self, threads: int = 16) -> None:
        self._guard = threading.Lock()
        self._waiting: dict[str, Job | None] = {}
        self._keys: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        # Daemon threads: one that waits for a parent must not keep the process from ending.
        self._threads = [
            threading.Thread(target=self._work, name=f"worker-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, key: str, job: Job) -> None:
        """Run ``job`` soon, after the job of the same key that may be running; it replaces one that still waits."""
        with self._guard:
            known = key in self._waiting
            self._waiting[key] = job
        if not known:
            self._keys.put(key)

    def busy(self, key: str) -> bool:
        """Whether a job of this key runs or waits."""
        with self._guard:
            return key in self._waiting

    def stop(self) -> None:
        """Drop what waits and let what runs finish, for STOP_GRACE seconds at most."""
        with self._guard:
            self._waiting = dict.fromkeys(self._waiting)
        for _ in self._threads:
            self._keys.put(None)
        deadline = time.monotonic() + STOP_GRACE
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        with self._guard:
            if self._waiting:
                log.warning("cut off: %s", ", ".join(self._waiting))

    def _work(self) -> None:
        while (key := self._keys.get()) is not None:
            while (job := self._next(key)) is not None:
                _run(key, job)

    def _next(self, key: str) -> Job | None:
        with self._guard:
            job = self._waiting[key]
            if job is None:
                del self._waiting[key]
            else:
                self._waiting[key] = None
            return job


def _run(key: str, job: Job) -> None:
    try:
        job()
    except (VirtmanError, DriverError) as error:
        log.warning("%s: %s", key, error)
    except Exception:  # the thread must live, whatever a job does
        log.exception("%s failed", key)
