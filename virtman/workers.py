"""Work that nobody waits for: repairs, new assignments, reports.

One job per key at a time; a job asked for again while it runs is run once more after it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from drivers.errors import DriverError
from virtman.errors import VirtmanError

log = logging.getLogger(__name__)

Job = Callable[[], object]


class Workers:
    """A pool of threads. A job's error is logged; whoever asked for it asks again when it still matters."""

    def __init__(self, threads: int = 16) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="worker")
        self._guard = threading.Lock()
        self._waiting: dict[str, Job | None] = {}

    def submit(self, key: str, job: Job) -> None:
        """Run ``job`` soon, after the job of the same key that may be running; it replaces one that still waits."""
        with self._guard:
            running = key in self._waiting
            self._waiting[key] = job
            if running:
                return
        self._pool.submit(self._run, key)

    def busy(self, key: str) -> bool:
        """Whether a job of this key runs or waits."""
        with self._guard:
            return key in self._waiting

    def stop(self) -> None:
        """Finish what runs, drop what waits."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _run(self, key: str) -> None:
        while True:
            with self._guard:
                job = self._waiting[key]
                if job is None:
                    del self._waiting[key]
                    return
                self._waiting[key] = None
            try:
                job()
            except (VirtmanError, DriverError) as error:
                log.warning("%s: %s", key, error)
            except Exception:  # the thread must live, whatever a job does
                log.exception("%s failed", key)
