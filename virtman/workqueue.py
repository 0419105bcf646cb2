"""The engine of the reconciler: the next thing to do for a key, now or after a pause, until nothing is left to do.

A key names something that is kept in order: an image, a VM. Whoever notices that something may have to be done for a
key wakes the key, or asks for a job. ``plan`` compares what should be with what is, and gives the next job, or nothing.
So a job is never lost: a failed job is still to be done, and is tried again after a pause. The pause grows, and is
partly random, so that hosts that failed together do not come back together. A job that is done again and again gets
the same pauses: a process that dies each time it is started, say. A job that keeps its key in order for longer than
twice the pause is done again at once: a process that is killed now and then is started without a pause.

Each kind of job has its own threads (``Pool``), so that no job waits for another kind: a Volt that does not answer
delays no restart of a dead process.
"""

from __future__ import annotations

import heapq
import logging
import random
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from queue import SimpleQueue

from drivers.errors import DriverError
from drivers.host.watch import Watch
from virtman.errors import VirtmanError

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 300.0
"""Seconds after the first failure in a row, and at most: each pause is twice as long, less a random part of a half."""

CALM = 60.0
"""Seconds after which nothing is known of a key that is in order."""

REPEATED = 5
"""Repetitions in a row after which ``troubles`` tells of them."""

STOP_GRACE = 3.0
"""Seconds that running jobs get to finish at the end. Being cut off must be safe for every job."""


class Pool(StrEnum):
    """Whose threads do a job.

    ``LONG``: may take seconds on this host; ``VOLT``: may ask Volt; ``CHILDREN``: admits children, which waits while
    their image is being published; ``SLOW``: may take hours, one after the other; ``STORAGE``: uses an image in place,
    whose storage may not answer.
    """

    LONG = "long"
    VOLT = "volt"
    CHILDREN = "children"
    SLOW = "slow"
    STORAGE = "storage"


THREADS = {Pool.LONG: 16, Pool.VOLT: 8, Pool.CHILDREN: 8, Pool.SLOW: 1, Pool.STORAGE: 8}
PLANNERS = 8
"""Threads that make plans. So does a thread that has just done a job of the key."""


@dataclass(frozen=True)
class Job:
    """The next thing to do for a key.

    ``on_demand``: the job is done because somebody asked for it (``WorkQueue.wake``), or because of news. If the job is
    still to be done afterwards, somebody has asked again: that is no repetition.
    """

    what: str
    act: Callable[[], object]
    pool: Pool = Pool.LONG
    on_demand: bool = False


BUSY = Job("wait", lambda: None)
"""What ``plan`` gives if nothing can be done now. The end of the call, or the next heartbeat, wakes the key."""


@dataclass
class _Entry:
    """A key that is not in order, or was not lately."""

    due: float | None = None
    """When to plan next; None: when somebody wakes the key, or the key is planned, or its job waits or runs."""
    running: bool = False
    again: bool = False
    """The key was woken while it ran."""
    asked: dict[str, bool] = field(default_factory=dict)
    """Jobs that were asked for, by name. True: asked again since the job last began."""
    job: Job | None = None
    """What waits for a thread of its pool, or is done by one."""
    not_before: float = 0.0
    """The end of the pause."""
    failures: int = 0
    """In a row."""
    repeats: int = 0
    """In a row: a job that nobody asked for succeeded, and was still to be done."""
    began: float = 0.0
    """When a job last began."""
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
        self._plan = plan
        self._clock = clock
        self._chance = chance
        self._entries: dict[str, _Entry] = {}
        self._dues: list[tuple[float, str]] = []
        """A heap of when to plan for keys; what differs from the entry's own ``due`` is out of date."""
        self._lines: dict[Pool, SimpleQueue[str | None]] = {pool: SimpleQueue() for pool in Pool}
        """The keys whose jobs wait for a thread of a pool; None ends a thread."""
        self._changed = threading.Lock()
        self._idle = threading.Condition(self._changed)
        """What ``settle`` waits at."""
        self._woken = threading.Condition(self._changed)
        """What the planners wait at. One is woken at a time: with all of them, a heartbeat cost more in
        wakings than in work."""
        self._stopped = threading.Event()
        self._threads = [Watch(f"plan-{number}", self._plan_due, self._stopped) for number in range(PLANNERS)]
        for pool, line in self._lines.items():
            work = partial(self._work, line)
            self._threads += [Watch(f"{pool}-{number}", work, self._stopped) for number in range(THREADS[pool])]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def wake(self, key: str, *, now: bool = False, ask: str = "") -> None:
        """Plan for a key soon. After a failure the pause goes on, unless ``now``: then what failed may work again.

        ``ask``: a job that is wanted. It is ``asked`` until the job succeeds, or the plan finds the key in order.
        """
        with self._changed:
            entry = self._entries.setdefault(key, _Entry())
            if now:
                entry.failures, entry.repeats, entry.not_before = 0, 0, 0.0
            if ask:
                entry.asked[ask] = True
            self._wake(key, entry)

    def asked(self, key: str, what: str) -> bool:
        """Whether a job of a key was asked for, and has not succeeded since."""
        with self._changed:
            return key in self._entries and what in self._entries[key].asked

    def _wake(self, key: str, entry: _Entry) -> None:
        if entry.running or entry.job is not None:
            entry.again = True
            return
        due = max(self._clock(), entry.not_before)
        if entry.due is None or not entry.not_before <= entry.due <= due:  # else the plan comes soon enough
            entry.due = due
            heapq.heappush(self._dues, (due, key))
        self._woken.notify()

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
        """Plan for all keys now, also for those that failed, and wait until nothing can be done for them at once."""
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
            self._woken.notify_all()
            self._idle.notify_all()
        for pool, line in self._lines.items():
            for _ in range(THREADS[pool]):
                line.put(None)
        deadline = time.monotonic() + STOP_GRACE
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))
        with self._changed:
            cut = [key for key, entry in self._entries.items() if entry.running]
        if cut:
            log.warning("cut off: %s", ", ".join(cut))

    def _plan_due(self) -> None:
        while (key := self._next_due()) is not None:
            self._plan_until_rest(key)

    def _work(self, line: SimpleQueue[str | None]) -> None:
        while (key := line.get()) is not None and not self._stopped.is_set():
            if self._do(key):  # to wake a planner costs more than most plans
                self._plan_until_rest(key)

    def _plan_until_rest(self, key: str) -> None:
        while self._plan_next(key):
            pass

    def _next_due(self) -> str | None:
        """The next key that is due, marked as running; None when all ends."""
        with self._changed:
            while not self._stopped.is_set():
                key, wait = self._due_key()
                if key is not None:
                    self._entries[key].running = True
                    if self._dues:
                        self._woken.notify()  # another thread watches what is due later
                    return key
                self._woken.wait(wait)
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

    def _plan_next(self, key: str) -> bool:
        """Leave the next job of a key to the threads of its pool. Returns whether to plan again now."""
        with self._changed:
            self._entries[key].again = False
        try:
            job = self._plan(key)
        except Exception as error:
            log.exception("%s: what to do cannot be told", key)
            return self._note_end(key, _NO_PLAN, repr(error))
        if job is None or job is BUSY:
            return self._rest(key, in_order=job is None)
        with self._changed:
            self._entries[key].job, self._entries[key].running = job, False
        self._lines[job.pool].put(key)
        return False

    def _rest(self, key: str, *, in_order: bool) -> bool:
        """Nothing can be done for a key now. Returns whether the key was woken meanwhile."""
        with self._changed:
            entry = self._entries[key]
            entry.running, entry.trouble = False, ""
            if entry.again:
                return self._goes_on(key, entry)
            if in_order:
                entry.asked.clear()
            if not entry.asked and self._clock() - entry.done_at > CALM:
                del self._entries[key]
            self._idle.notify_all()
            return False

    def _goes_on(self, key: str, entry: _Entry) -> bool:
        """Whether to plan for a key again now, by this thread, and not after a pause or never."""
        entry.running = entry.not_before <= self._clock() and not self._stopped.is_set()
        if not entry.running:
            self._wake(key, entry)
            self._idle.notify_all()
        return entry.running

    def _do(self, key: str) -> bool:
        with self._changed:
            entry = self._entries[key]
            entry.running, job, entry.began = True, entry.job or _NO_PLAN, self._clock()
            if job.what in entry.asked:
                entry.asked[job.what] = False
        return self._note_end(key, job, _run(key, job))

    def _note_end(self, key: str, job: Job, trouble: str) -> bool:
        with self._changed:
            entry, now = self._entries[key], self._clock()
            entry.running, entry.job = False, None
            if trouble:
                entry.failures += 1
                entry.not_before = now + self._pause(entry.failures)
            else:
                trouble = self._note_success(entry, job, now)
            if trouble and not entry.trouble:  # not once more after each pause
                log.warning("%s: %s", key, trouble)
            entry.trouble = trouble
            return self._goes_on(key, entry)

    def _note_success(self, entry: _Entry, job: Job, now: float) -> str:
        """Returns the trouble of a job that succeeds all the time, and is still to be done."""
        entry.failures = 0
        if entry.asked.get(job.what) is False:
            del entry.asked[job.what]
        if job.on_demand:
            return ""
        repeated = job.what == entry.done and entry.began - entry.done_at <= 2 * _longest(max(1, entry.repeats))
        entry.repeats = entry.repeats + 1 if repeated else 0
        entry.done, entry.done_at = job.what, now
        if entry.repeats:
            entry.not_before = now + self._pause(entry.repeats)
        if entry.repeats <= REPEATED:
            return ""
        return f"{job.what}: done {entry.repeats + 1} times, and it is still to be done"

    def _pause(self, times: int) -> float:
        return _longest(times) * (1 - self._chance() / 2)


def _longest(times: int) -> float:
    """The most seconds of the pause after so many failures, or repetitions, in a row."""
    return float(min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(times - 1, 30)))


_NO_PLAN = Job("plan", lambda: None)
"""What failed if no job could be named."""


def _run(key: str, job: Job) -> str:
    """Do a job. Returns why the job failed, or nothing."""
    log.debug("%s: %s", key, job.what)
    try:
        job.act()
    except (VirtmanError, DriverError) as error:
        return f"{job.what}: {error}"
    except Exception as error:  # the others must be done, whatever one does
        log.exception("%s: %s failed", key, job.what)
        return f"{job.what}: unexpected {error!r}"
    return ""
