"""What has to be done, by key."""

from __future__ import annotations

import threading
from functools import partial

from testtools import TestCase

from tests.patience import PATIENCE, wait_until
from tests.unit.clock import Clock
from tests.unit.logs import Logged
from virtman.errors import CoordinatorDown
from virtman.workqueue import BUSY, CALM, FIRST_PAUSE, LONGEST_PAUSE, REPEATED, THREADS, Job, Pool, WorkQueue


class Work:
    """What is to be done for one key: its jobs, in order; what each one raises; and how often it was looked at."""

    def __init__(self, *errors: Exception | None, pool: Pool = Pool.LONG, on_demand: bool = False) -> None:
        self.errors = list(errors)
        self.pool, self.on_demand = pool, on_demand
        self.looks = 0
        self.done = 0
        self.go = threading.Event()
        self.go.set()
        self.running = threading.Event()

    def next(self) -> Job | None:
        self.looks += 1
        return Job("work", self.act, self.pool, self.on_demand) if self.errors else None

    def act(self) -> None:
        self.running.set()
        self.go.wait(PATIENCE)
        error = self.errors.pop(0)
        self.done += 1
        if error is not None:
            raise error


class WorkQueueTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.clock = Clock()
        self.work: dict[str, Work] = {}
        self.chance = 0.0
        self.queue = WorkQueue(lambda key: self.work[key].next(), self.clock, lambda: self.chance)
        self.queue.start()
        self.addCleanup(self.queue.stop)

    def give(self, key: str, *errors: Exception | None, pool: Pool = Pool.LONG, on_demand: bool = False) -> Work:
        """Work for a key that runs at once."""
        self.work[key] = Work(*errors, pool=pool, on_demand=on_demand)
        self.addCleanup(self.work[key].go.set)
        return self.work[key]

    def blocked(self, key: str, *, pool: Pool = Pool.LONG) -> Work:
        """Work that has begun and waits for ``go``."""
        work = self.give(key, None, pool=pool)
        work.go.clear()
        self.queue.wake(key)
        self.assertTrue(work.running.wait(PATIENCE))
        return work

    def quiet(self, key: str) -> None:
        """Wait until nothing is done for a key, and nothing is due."""
        wait_until(lambda: not self.queue.busy(key), f"{key} is never in order")

    def wake_and_wait(self, key: str, *, now: bool = False, ask: str = "") -> None:
        """Wake a key, and wait until nothing is done for it."""
        self.queue.wake(key, now=now, ask=ask)
        self.quiet(key)

    def pass_time(self, seconds: float, *keys: str) -> None:
        """Let time pass, have the queue see it, and wait until nothing is done for the keys."""
        self.clock.advance(seconds)
        self.give("time")
        self.wake_and_wait("time")
        for key in keys:
            self.quiet(key)


class OrderTest(WorkQueueTest):
    def test_a_key_that_is_woken_is_brought_in_order_step_by_step(self) -> None:
        for pool in Pool:
            work = self.give("a", None, None, None, pool=pool, on_demand=True)
            self.wake_and_wait("a")
            self.assertEqual((3, 4), (work.done, work.looks), "it is looked at until there is nothing to do")
            self.pass_time(CALM + 1)

    def test_one_thing_of_a_key_is_done_at_a_time(self) -> None:
        for pool in Pool:
            work = self.blocked(pool, pool=pool)
            work.running.clear()
            for _ in range(3):
                self.queue.wake(pool)
            self.give("b", None)
            self.wake_and_wait("b")
            self.assertFalse(work.running.is_set())
            work.go.set()
            self.quiet(pool)

    def test_a_key_that_is_woken_while_it_is_looked_at_is_looked_at_again(self) -> None:
        work = self.give("a")
        looked = threading.Event()

        def plan() -> Job | None:
            work.looks += 1
            if work.looks == 1:
                self.queue.wake("a")
            else:
                looked.set()
            return None

        work.next = plan  # type: ignore[method-assign]
        self.queue.wake("a")
        self.assertTrue(looked.wait(PATIENCE))

    def test_work_never_waits_for_that_of_another_kind(self) -> None:
        for pool, other in ((Pool.LONG, Pool.STORAGE), (Pool.LONG, Pool.VOLT), (Pool.VOLT, Pool.LONG)):
            # Keys of their own each time: what the threads still do for the last ones' keys is none of this work.
            keys = [f"{pool}-beside-{other}-{number}" for number in range(sum(THREADS.values()))]
            waiting = [self.give(key, None, pool=pool) for key in keys]
            for key, work in zip(keys, waiting, strict=True):
                work.go.clear()
                self.queue.wake(key)
            wait_until(partial(self.busy_with, waiting, THREADS[pool]), f"{pool} work does not begin")
            work = self.give(f"{other}-beside-{pool}", None, pool=other)
            self.queue.wake(f"{other}-beside-{pool}")
            self.quiet(f"{other}-beside-{pool}")
            self.assertEqual((1, 0), (work.done, sum(one.done for one in waiting)))
            for work in waiting:
                work.go.set()
            for key in keys:
                self.quiet(key)
            self.assertEqual(len(waiting), sum(one.done for one in waiting), "each is done when a thread is free")

    def busy_with(self, waiting: list[Work], threads: int) -> bool:
        """Whether all of this work was looked at, and as much of it runs as there are threads."""
        return all(work.looks for work in waiting) and sum(work.running.is_set() for work in waiting) >= threads

    def test_a_key_in_order_is_forgotten(self) -> None:
        self.give("a", None)
        self.wake_and_wait("a")
        self.pass_time(CALM + 1)
        for _ in range(2):
            self.wake_and_wait("a")
        self.assertNotIn("a", self.queue._entries)


class FailureTest(WorkQueueTest):
    def fail_once(self, key: str = "a") -> Work:
        work = self.give(key, CoordinatorDown("nobody there"), None)
        self.wake_and_wait(key)
        return work

    def test_what_failed_is_told_until_it_is_done(self) -> None:
        work = self.fail_once()
        self.assertEqual({"a": "work: nobody there"}, self.queue.troubles())
        self.pass_time(FIRST_PAUSE, "a")
        self.assertEqual((2, {}), (work.done, self.queue.troubles()))

    def test_it_is_tried_again_after_the_pause_and_not_before_unless_there_are_news(self) -> None:
        work = self.fail_once()
        self.pass_time(0.9 * FIRST_PAUSE)
        self.wake_and_wait("a")
        self.assertEqual(1, work.done)
        self.pass_time(0.1 * FIRST_PAUSE, "a")
        self.assertEqual(2, work.done)
        work = self.fail_once()
        self.wake_and_wait("a", now=True)
        self.assertEqual(2, work.done)

    def test_news_begin_the_pauses_anew_and_what_fails_is_logged_once(self) -> None:
        logged = Logged(self, "virtman.workqueue")
        self.give("a", *[CoordinatorDown("nobody there")] * 3)
        self.wake_and_wait("a")
        self.pass_time(FIRST_PAUSE, "a")
        self.wake_and_wait("a", now=True)
        self.assertEqual(self.clock.now + FIRST_PAUSE, self.queue._entries["a"].due)
        self.assertEqual(1, logged.lines.count("a: work: nobody there"))

    def test_what_is_in_order_without_a_job_is_no_trouble_any_more(self) -> None:
        work = self.give("a", None, CoordinatorDown("nobody there"))
        self.wake_and_wait("a")
        self.wake_and_wait("a", now=True)
        self.assertEqual((2, {}), (work.done, self.queue.troubles()))

    def test_the_end_of_a_pause_that_was_cut_short_begins_nothing(self) -> None:
        work = self.fail_once()
        work.go.clear()
        work.running.clear()
        self.queue.wake("a", now=True)
        self.assertTrue(work.running.wait(PATIENCE))
        looks = work.looks
        self.pass_time(FIRST_PAUSE)
        self.assertEqual(looks, work.looks)
        work.go.set()

    def test_it_is_tried_again_though_nobody_wakes_anything(self) -> None:
        work = Work(CoordinatorDown("nobody there"), None)
        queue = WorkQueue(lambda _key: work.next())
        queue.start()
        self.addCleanup(queue.stop)
        queue.wake("a")
        wait_until(lambda: work.done == 2, "it is not tried again")

    def pauses(self, failures: int) -> list[float]:
        """The pause after each of so many failures in a row."""
        self.give("a", *[CoordinatorDown("nobody there")] * failures, None)
        self.queue.wake("a")
        found = []
        for _ in range(failures):
            self.quiet("a")
            due = self.queue._entries["a"].due
            assert due is not None
            found.append(due - self.clock.now)
            self.pass_time(found[-1], "a")
        return found

    def test_pauses_grow_up_to_a_bound(self) -> None:
        pauses = self.pauses(14)
        self.assertEqual([FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE], pauses[:3])
        self.assertEqual([LONGEST_PAUSE] * 2, pauses[-2:])

    def test_a_success_begins_anew(self) -> None:
        self.pauses(5)
        self.assertEqual([FIRST_PAUSE], self.pauses(1))

    def test_chance_spreads_those_that_failed_together(self) -> None:
        self.chance = 1.0
        self.assertEqual([FIRST_PAUSE / 2], self.pauses(1))

    def test_a_bug_is_logged_and_stops_nothing(self) -> None:
        logged = Logged(self, "virtman.workqueue")
        for pool in Pool:
            self.give("a", ValueError("no such luck"), pool=pool)
            self.wake_and_wait("a", now=True)
        self.assertIn("a: work failed\nTraceback", "\n".join(logged.lines))
        self.assertEqual({"a": "work: unexpected ValueError('no such luck')"}, self.queue.troubles())

    def test_a_bug_in_the_plan_is_told_and_tried_again(self) -> None:
        self.wake_and_wait("unknown")
        self.assertEqual({"unknown": "KeyError('unknown')"}, self.queue.troubles())
        work = self.give("unknown", None)
        self.pass_time(FIRST_PAUSE, "unknown")
        self.assertEqual(1, work.done)

    def test_a_job_that_changes_nothing_is_done_after_pauses_and_told(self) -> None:
        work = self.give("a", *[None] * 100)
        self.wake_and_wait("a")
        self.assertEqual((2, {}), (work.done, self.queue.troubles()))
        for number in range(REPEATED):
            self.pass_time(FIRST_PAUSE * 2**number, "a")
        self.assertEqual(2 + REPEATED, work.done)
        self.assertIn("still to be done", self.queue.troubles()["a"])

    def test_a_job_that_is_asked_for_again_and_again_is_done_each_time(self) -> None:
        work = self.give("a", *[None] * 3 * REPEATED, on_demand=True)
        self.wake_and_wait("a")
        self.assertEqual((3 * REPEATED, {}), (work.done, self.queue.troubles()))

    def test_what_was_in_order_for_longer_than_twice_the_pause_is_no_repetition(self) -> None:
        for repeats in (0, 3):
            key = f"a-{repeats}"
            self.give(key, *[None] * (1 + repeats))
            self.wake_and_wait(key)
            for number in range(repeats):
                self.pass_time(FIRST_PAUSE * 2**number, key)
            self.clock.advance(2 * FIRST_PAUSE * 2 ** max(0, repeats - 1) + 0.1)
            for _ in range(3):
                work = self.give(key, None)
                self.wake_and_wait(key)
                self.assertEqual(1, work.done)
                self.clock.advance(2 * FIRST_PAUSE + 0.1)


class AskTest(WorkQueueTest):
    def test_a_job_is_asked_for_until_it_succeeds(self) -> None:
        work = self.give("a", CoordinatorDown("nobody there"), None, on_demand=True)
        self.wake_and_wait("a", ask="work")
        self.assertTrue(self.queue.asked("a", "work"))
        self.pass_time(FIRST_PAUSE, "a")
        self.assertEqual((2, False), (work.done, self.queue.asked("a", "work")))

    def test_a_job_that_is_asked_for_while_it_runs_stays_asked_for(self) -> None:
        work = self.blocked("a", pool=Pool.LONG)
        work.errors.append(None)
        self.queue.wake("a", ask="work")
        asked: list[bool] = []
        act, work.act = work.act, lambda: (asked.append(self.queue.asked("a", "work")), act())[1]  # type: ignore[func-returns-value, method-assign]
        work.go.set()
        self.quiet("a")
        self.assertEqual(([True], False), (asked, self.queue.asked("a", "work")))

    def test_it_is_forgotten_when_the_key_is_in_order_and_kept_while_somebody_is_busy_with_it(self) -> None:
        work = self.give("a")
        for plan, asked in ((BUSY, True), (None, False)):
            work.next = lambda plan=plan: plan  # type: ignore[method-assign, misc]
            self.wake_and_wait("a", ask="work")
            self.assertEqual(asked, self.queue.asked("a", "work"))


class SettleTest(WorkQueueTest):
    def test_it_looks_at_keys_that_failed_and_waits_for_what_they_wake(self) -> None:
        first, second = self.give("a", CoordinatorDown("nobody there"), None), self.give("b")
        self.wake_and_wait("a")
        first.act = lambda: (first.errors.pop(), second.errors.append(None), self.queue.wake("b"))  # type: ignore[assignment, func-returns-value]
        self.queue.settle(["a", "b"])
        self.assertEqual(([], 1), (first.errors, second.done))

    def test_it_does_not_wait_for_pauses(self) -> None:
        self.give("a", CoordinatorDown("nobody there"), CoordinatorDown("nobody there"))
        self.queue.settle(["a"])
        self.assertEqual(["a"], list(self.queue.troubles()))


class StopTest(WorkQueueTest):
    def test_all_threads_end_and_nothing_is_begun(self) -> None:
        work = self.give("a", None)
        self.queue.stop()
        self.queue.wake("a")
        self.assertEqual(0, work.looks)
        self.assertEqual([], [thread.name for thread in self.queue._threads if thread.is_alive()])

    def test_it_waits_for_what_runs(self) -> None:
        work = self.blocked("a")
        stopping = threading.Thread(target=self.queue.stop)
        stopping.start()
        self.addCleanup(stopping.join)
        work.go.set()
        stopping.join()
        self.assertEqual(1, work.done)

    def test_it_cuts_off_what_does_not_end(self) -> None:
        logged = Logged(self, "virtman.workqueue")
        self.blocked("a", pool=Pool.LONG)
        self.queue.stop()
        self.assertIn("cut off: a", logged.lines)
