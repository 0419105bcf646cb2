"""Trying again, with pauses that grow up to a bound."""

from __future__ import annotations

import time

from testtools import TestCase

from drivers.host.retry import GROWTH, Backoff, again, until


class UntilTest(TestCase):
    def test_tries_until_it_is_done(self) -> None:
        answers = [False, False, True, True]
        self.assertTrue(until(lambda: answers.pop(0), limit=10, first=0.001))
        self.assertEqual([True], answers)

    def test_gives_up_at_the_limit(self) -> None:
        self.assertFalse(until(lambda: False, limit=0.01, first=0.001))

    def test_no_pause_is_longer_than_the_longest(self) -> None:
        pauses: list[float] = []
        self.patch(time, "sleep", pauses.append)
        until(lambda: len(pauses) >= 12, limit=10, first=0.001, longest=0.004)
        self.assertEqual((0.001, 0.004), (pauses[0], max(pauses)))


class AgainTest(TestCase):
    def call(self, *errors: Exception) -> str:
        """Make a call that fails like this one time after the other; errors of keys pass."""
        left = list(errors)

        @again(lambda error: isinstance(error, KeyError), limit=0.05, first=0.001)
        def act() -> str:
            if left:
                raise left.pop(0)
            return "done"

        return act()

    def test_what_passes_is_tried_again_and_all_else_is_raised(self) -> None:
        self.assertEqual("done", self.call(KeyError(), KeyError()))
        self.assertRaises(ValueError, self.call, KeyError(), ValueError())
        self.assertRaises(KeyError, self.call, *[KeyError()] * 1000)


class BackoffTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.now = 100.0
        self.backoff = Backoff(1.0, 1.2, lambda: self.now)

    def pauses(self, failures: int) -> list[float]:
        """Fail so often; the pause after each time."""
        found = []
        for _ in range(failures):
            self.backoff.note_failure()
            found.append(round(self.backoff.due - self.now, 6))
            self.now = self.backoff.due
        return found

    def test_pauses_grow_up_to_a_bound_and_begin_anew_after_a_change(self) -> None:
        self.assertEqual(self.now, self.backoff.due)
        self.assertEqual([1.0, GROWTH, 1.2, 1.2], self.pauses(4))
        self.backoff.reset()
        self.assertEqual(self.now, self.backoff.due)
        self.assertEqual([1.0], self.pauses(1))
