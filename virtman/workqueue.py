"""The engine of the reconciler: the next thing to do for a key, now or after a pause, until nothing is left to do.

A key names something that is kept in order: an image, a VM. Whoever notices that something may have to be done for it
wakes the key; ``plan`` compares what should be with what is, and gives the next job, or nothing. So a job is never
lost: what failed is still to be done, and is tried again after a pause that grows, with some chance in it, so that
hosts that failed together do not come back together. A job that is done again and again gets the same pauses: a process
that dies each time it is started, say.

Each kind of job has threads of its own (``Pool``), so that none waits for those of another kind: a Volt that does not
answer keeps no dead process from being started again.
"""

from __future__ import annotations

import heapq
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from drivers.errors import DriverError
from drivers.host.watch import Watch
from virtman.errors import VirtmanError

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 300.0
"""Seconds after the first failure in a row, and at most: each pause is twice as long, less up to a half by chance."""

CALM = 60.0
"""Seconds after which a job that is done once more is no repetition."""

REPEATED = 5
"""Repetitions in a row after which ``troubles`` tells of them."""

STOP_GRACE = 3.0
"""Seconds that running jobs get to finish at the end. Being cut off must be safe for every job."""


class Pool(StrEnum):
    """Whose threads do a job: ``LONG`` is for what may take seconds on this host, ``VOLT`` for what may ask Volt,
    ``CHILDREN`` for letting them in, which waits while their image is being published. ``SLOW`` is for what may take
    hours, one after the other; ``PLACE`` for what is served in place, whose storage may be silent. Plans are made
    in ``SHORT``, and by who has just done a job of the key: what is short is done there as well.
    """

    SHORT = "short"
    LONG = "long"
    VOLT = "volt"
    CHILDREN = "children"
    SLOW = "slow"
    PLACE = "place"


THREADS = {Pool.SHORT: 8, Pool.LONG: 16, Pool.VOLT: 8, Pool.CHILDREN: 8, Pool.SLOW: 1, Pool.PLACE: 8}


@dataclass(frozen=True)
class Job:
    """The next thing to do for a key.

    ``on_demand``: who asks for it asks once, and it takes that away when it begins. If it is still to be done after
    that, somebody has asked again: it is no repetition.
    """

    what: str
    act: Callable[[], object]
    pool: Pool = Pool.SHORT
    on_demand: bool = False


@dataclass
class _Entry:
    """A key that is not in order, or was not lately."""

    due: float | None = None
    """When to look at it next; None: when somebody wakes it, or it is looked at, or its job waits or runs."""
    running: bool = False
    again: bool = False
    """It was woken while it ran."""
    job: Job | None = None
    """What waits for a thread of its pool, or is done by one."""
    not_before: float = 0.0
    """The end of its pause."""
    failures: int = 0
    """In a row."""
    repeats: int = 0
    """In a row: a job that nobody asked for succeeded, and was still to be done."""
    done: str = ""
    done_at: float = float("-inf")
    """The job that succeeded last, and when."""
    trouble: str = ""


class WorkQueue:
    """Threads that carry out what ``plan`` gives for a key. ``clock`` in seconds, as ``time.monotonic``."""

    def __init__(
        self,
        plan: Callable[[str], Job | None],
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """Nothing runs yet."""
        self._plan = plan
        self._clock = clock
        self._chance = chance
        self._entries: dict[str, _Entry] = {}
        self._dues: list[tuple[float, str]] = []
        """A heap of when to look at keys; what differs from the entry's own ``due`` is out of date."""
        self._lines: dict[Pool, deque[str]] = {pool: deque() for pool in Pool}
        """The keys whose jobs wait for a thread of a pool, the one that has waited longest first."""
        self._changed = threading.Lock()
        self._idle = threading.Condition(self._changed)
        """What ``settle`` waits at."""
        self._work = {pool: threading.Condition(self._changed) for pool in Pool}
        """What the threads of a pool wait at. One is woken at a time: with all of them, a heartbeat cost more in
        wakings than in work."""
        self._stopped = threading.Event()
        self._threads = [
            Watch(f"{pool}-{number}", partial(self._work_for, pool), self._stopped)
            for pool in Pool
            for number in range(THREADS[pool])
        ]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def wake(self, key: str, *, now: bool = False) -> None:
        """Look at a key soon. After a failure its pause goes on, unless ``now``: then what failed may work again."""
        with self._changed:
            entry = self._entries.setdefault(key, _Entry())
            if now:
                entry.failures, entry.repeats, entry.not_before = 0, 0, 0.0
            self._wake(key, entry)

    def _wake(self, key: str, entry: _Entry) -> None:
        if entry.running or entry.job is not None:
            entry.again = True
            return
        due = max(self._clock(), entry.not_before)
        if entry.due is None or not entry.not_before <= entry.due <= due:  # else it is looked at soon enough
            entry.due = due
            heapq.heappush(self._dues, (due, key))
        self._work[Pool.SHORT].notify()

    def busy(self, key: str) -> bool:
        """Whether something is done for a key now, or will be at once."""
        with self._changed:
            return self._busy(key)

    def _busy(self, key: str) -> bool:
        entry = self._entries.get(key)
        if entry is None:
            return False
        return entry.running or entry.job is not None or (entry.due is not None and entry.due <= self._clock())

    def settle(self, keys: Collection[str]) -> None:
        """Look at all keys now, also at those that failed, and wait until nothing can be done for them at once."""
        for key in keys:
            self.wake(key, now=True)
        with self._changed:
            self._idle.wait_for(lambda: self._stopped.is_set() or not any(map(self._busy, keys)))

    def troubles(self) -> dict[str, str]:
        """Why the last job failed, by key, of those that are yet to be done."""
        with self._changed:
            return {key: entry.trouble for key, entry in sorted(self._entries.items()) if entry.trouble}

    def stop(self) -> None:
        """Begin nothing any more, and let what runs finish, for STOP_GRACE seconds at most."""
        with self._changed:
            self._stopped.set()
            for work in (*self._work.values(), self._idle):
                work.notify_all()
        deadline = time.monotonic() + STOP_GRACE
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))
        with self._changed:
            cut = [key for key, entry in self._entries.items() if entry.running]
        if cut:
            log.warning("cut off: %s", ", ".join(cut))

    def _work_for(self, pool: Pool) -> None:
        find = self._due_key if pool is Pool.SHORT else partial(self._waiting_key, pool)
        while (key := self._next(find, self._work[pool])) is not None:
            job = self._entries[key].job
            again = job is None or self._done(key, job, _run(key, job))
            while again:  # by who is at it: to wake another thread costs more than most looks
                again = self._look(key)

    def _next(self, find: Callable[[], tuple[str | None, float | None]], changed: threading.Condition) -> str | None:
        """The key that ``find`` gives, marked as running; None when all ends."""
        with self._changed:
            while not self._stopped.is_set():
                key, wait = find()
                if key is not None:
                    self._entries[key].running = True
                    if self._dues and changed is self._work[Pool.SHORT]:
                        changed.notify()  # somebody else watches what is due later
                    return key
                changed.wait(wait)
            return None

    def _due_key(self) -> tuple[str | None, float | None]:
        """A key that is due, or the seconds until one is."""
        while self._dues:
            due, key = self._dues[0]
            if (wait := due - self._clock()) > 0:
                return None, wait
            heapq.heappop(self._dues)
            if (entry := self._entries.get(key)) is not None and entry.due == due:
                entry.due = None
                return key, None
        return None, None

    def _waiting_key(self, pool: Pool) -> tuple[str | None, float | None]:
        """The key whose job has waited longest for a thread of the pool."""
        line = self._lines[pool]
        return (line.popleft() if line else None), None

    def _look(self, key: str) -> bool:
        """Do what is to be done for a key, if it is short; else leave it to the threads for it.

        Whether it is to be looked at again now.
        """
        with self._changed:
            self._entries[key].again = False
        try:
            job = self._plan(key)
        except Exception as error:
            log.exception("%s: what to do cannot be told", key)
            return self._done(key, _NO_PLAN, repr(error))
        if job is None:
            return self._in_order(key)
        if job.pool is Pool.SHORT:
            return self._done(key, job, _run(key, job))
        with self._changed:
            self._entries[key].job, self._entries[key].running = job, False
            self._lines[job.pool].append(key)
            self._work[job.pool].notify()
        return False

    def _in_order(self, key: str) -> bool:
        """There is nothing to do for a key now. Whether it was woken meanwhile."""
        with self._changed:
            entry = self._entries[key]
            entry.running, entry.trouble = False, ""
            if entry.again:
                return self._goes_on(key, entry)
            if self._clock() - entry.done_at > CALM:
                del self._entries[key]
            self._idle.notify_all()
            return False

    def _goes_on(self, key: str, entry: _Entry) -> bool:
        """Whether a key is looked at again now, by this thread, and not after a pause or never."""
        entry.running = entry.not_before <= self._clock() and not self._stopped.is_set()
        if not entry.running:
            self._wake(key, entry)
            self._idle.notify_all()
        return entry.running

    def _done(self, key: str, job: Job, trouble: str) -> bool:
        """A job has ended. Whether to look at its key again at once, and not after a pause."""
        with self._changed:
            entry, now = self._entries[key], self._clock()
            entry.running, entry.job = False, None
            if trouble:
                entry.failures += 1
                entry.not_before = now + self._pause(entry.failures)
            else:
                entry.failures = 0
                if not job.on_demand:
                    trouble = self._note_success(entry, job.what, now)
            if trouble and not entry.trouble:  # not once more after each pause
                log.warning("%s: %s", key, trouble)
            entry.trouble = trouble
            return self._goes_on(key, entry)

    def _note_success(self, entry: _Entry, what: str, now: float) -> str:
        """A job of which nobody had to ask again has succeeded. Returns what is odd, if that happens all the time."""
        repeated = what == entry.done and now - entry.done_at <= CALM
        entry.repeats = entry.repeats + 1 if repeated else 0
        entry.done, entry.done_at = what, now
        if entry.repeats:
            entry.not_before = now + self._pause(entry.repeats)
        return f"{what}: done {entry.repeats + 1} times, and it is still to be done" if entry.repeats > REPEATED else ""

    def _pause(self, times: int) -> float:
        """Seconds to wait after so many failures or repetitions."""
        pause: float = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(times - 1, 30))
        return pause * (1 - self._chance() / 2)


_NO_PLAN = Job("plan", lambda: None)
"""What failed where no job could be named."""


def _run(key: str, job: Job) -> str:
    """Do a job. Returns why it failed, or nothing."""
    log.debug("%s: %s", key, job.what)
    try:
        job.act()
    except (VirtmanError, DriverError) as error:
        return f"{job.what}: {error}"
    except Exception as error:  # the others must be done, whatever one does
        log.exception("%s: %s failed", key, job.what)
        return f"{job.what}: unexpected {error!r}"
    return ""
