"""Threads that begin again when they die."""

from __future__ import annotations

import threading
from collections.abc import Callable

from testtools import TestCase

from drivers.host.watch import FIRST_PAUSE, LONGEST_PAUSE, Death, Watch, deaths, pause_after
from tests.unit.logs import Logged


class Act:
    """Raises what it is told to, then waits until the test ends."""

    def __init__(self, *errors: Exception) -> None:
        self._errors = list(errors)
        self.settled, self.over = threading.Event(), threading.Event()

    def __call__(self) -> None:
        if self._errors:
            raise self._errors.pop(0)
        self.settled.set()
        self.over.wait()


class Hurried(threading.Event):
    """Lets nobody wait, and is set after so many who wanted to. ``pauses``: for how long each of them did."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self._times = times
        self.pauses: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.pauses.append(timeout)
        if len(self.pauses) == self._times:
            self.set()
        return self.is_set()


class WatchTest(TestCase):
    def watch(self, act: Callable[[], None], stopped: threading.Event | None = None) -> Watch:
        watch = Watch("lookout", act, stopped)
        watch.start()
        self.addCleanup(watch.join)
        if isinstance(act, Act):
            self.addCleanup(act.over.set)
        return watch

    def test_one_that_dies_begins_again_and_says_so(self) -> None:
        heard = Logged(self, "drivers.host.watch")
        act = Act(OSError("too many open files"), ValueError("a bug"))
        self.watch(act)
        act.settled.wait()
        self.assertIn(Death("lookout", 2, "ValueError('a bug')", running=True), deaths())
        self.assertIn("thread lookout died", " ".join(heard.lines))

    def test_one_that_lives_is_not_reported(self) -> None:
        act = Act()
        watch = self.watch(act)
        act.settled.wait()
        self.assertIsNone(watch.death)
        self.assertNotIn("lookout", [death.thread for death in deaths()])

    def test_the_first_pause_follows_a_long_life(self) -> None:
        self.assertEqual(LONGEST_PAUSE, pause_after(LONGEST_PAUSE, LONGEST_PAUSE - 1))
        self.assertEqual(FIRST_PAUSE, pause_after(LONGEST_PAUSE, LONGEST_PAUSE + 1))

    def test_pauses_grow_up_to_a_bound(self) -> None:
        def die() -> None:
            raise OSError

        hurried = Hurried(12)
        self.watch(die, hurried).join()
        self.assertEqual([FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE], hurried.pauses[:3])
        self.assertEqual([LONGEST_PAUSE] * 2, hurried.pauses[-2:])

    def test_one_that_was_stopped_does_not_begin_again(self) -> None:
        stopped = threading.Event()
        runs: list[int] = []

        def die() -> None:
            runs.append(1)
            stopped.set()
            raise OSError

        self.watch(die, stopped).join()
        self.assertEqual(1, len(runs))
