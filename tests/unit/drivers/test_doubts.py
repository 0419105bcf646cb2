"""Parents that do not answer reads: when one is left, and for how long it comes behind the others."""

from __future__ import annotations

from unittest import mock

from testtools import TestCase

from drivers.attach.doubts import HANG, SILENCE, Doubts
from drivers.attach.hangs import Hangs

HUNG, WELL = "hung", "well"
LONG = 60


class DoubtsTest(TestCase):
    """A host that reads by two parents, of which one has answered nothing since the clock was at 0."""

    def setUp(self) -> None:
        super().setUp()
        self.now = SILENCE
        self.hangs: Hangs[str] = Hangs(lambda: self.now)

    def left(self, *, silent: bool, answers: bool, reached: bool) -> list[str]:
        """Doubt the parent for a minute. Returns how it was left, if it was, and whether it rests."""

        def wait(seconds: float) -> bool:
            self.now += seconds
            return self.now > LONG

        signs, route, said = mock.Mock(), mock.Mock(), []
        signs.stands_still = lambda parent, seconds: parent == HUNG and self.now >= seconds
        signs.is_silent.return_value, signs.takes_connections.return_value = silent, reached
        signs.awaits_acknowledgement.return_value = signs.is_asked_again_within.return_value = False
        signs.reads.return_value = 0
        signs.first_that_answers = lambda parents: WELL if answers and WELL in parents else None
        route.paths.return_value = [HUNG, WELL]
        route.leave = lambda parent, *, silent: said.append(f"{parent} left as {'silent' if silent else 'hung'}")
        Doubts("img", signs, route, self.hangs, wait, lambda: self.now).resolve(HUNG)
        return said + ["rests"] * self.hangs.rests(HUNG)

    def test_one_that_hangs_is_left_for_one_that_answers_and_rests(self) -> None:
        self.assertEqual(["hung left as hung", "rests"], self.left(silent=False, answers=True, reached=False))
        self.assertEqual(HANG, self.now)

    def test_one_that_is_silent_is_left_at_once_for_one_that_answers_and_does_not_rest(self) -> None:
        for _ in range(4):  # as often as the network pauses
            self.assertEqual(["hung left as silent"], self.left(silent=True, answers=True, reached=False))
        self.assertEqual(SILENCE, self.now)

    def test_where_no_other_answers_only_one_that_was_silent_and_is_reached_again_is_left(self) -> None:
        for silent, reached in ((False, False), (False, True), (True, False)):
            self.now = SILENCE
            self.assertEqual([], self.left(silent=silent, answers=False, reached=reached))
        self.now = SILENCE
        self.assertEqual(["hung left as silent"], self.left(silent=True, answers=False, reached=True))
        self.assertLess(self.now, 2 * HANG)

    def test_each_rest_is_twice_as_long_as_the_one_before(self) -> None:
        rests = []
        for _ in range(8):
            self.hangs.note(HUNG)
            rests.append(self.hangs.next_end())
            self.now += rests[-1]
            self.assertFalse(self.hangs.rests(HUNG))
        self.assertEqual([60, 120, 240, 480, 960, 1920, 3600, 3600], rests)
