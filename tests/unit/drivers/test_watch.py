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

    def test_pauses_grow_up_to_a_bound_and_the_first_one_follows_a_long_life(self) -> None:
        for last, lived, pause in (
            (0, 0, FIRST_PAUSE),
            (FIRST_PAUSE, 0, 2 * FIRST_PAUSE),
            (LONGEST_PAUSE, LONGEST_PAUSE - 1, LONGEST_PAUSE),
            (LONGEST_PAUSE, LONGEST_PAUSE + 1, FIRST_PAUSE),
        ):
            self.assertEqual(pause, pause_after(last, lived))

    def test_one_that_was_stopped_does_not_begin_again(self) -> None:
        stopped = threading.Event()
        runs: list[int] = []

        def die() -> None:
            runs.append(1)
            stopped.set()
            raise OSError

        self.watch(die, stopped).join()
        self.assertEqual(1, len(runs))
