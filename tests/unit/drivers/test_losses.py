"""Lost parents, and when others are told of them."""

from __future__ import annotations

from testtools import TestCase

from drivers.attach.losses import RETURN_LIMIT, Losses


class LossesTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.now = 1000.0
        self.losses: Losses[str] = Losses(lambda: self.now)

    def lose_in_silence(self, parent: str) -> None:
        self.losses.note_silent(parent)
        self.losses.note(parent)

    def test_one_that_went_is_told_of_at_once_and_once(self) -> None:
        self.losses.note("gone")
        self.assertEqual(["gone"], self.losses.take_due())
        self.assertEqual([], self.losses.take_due())

    def test_one_that_was_silent_is_told_of_when_it_is_not_back_after_a_while(self) -> None:
        self.lose_in_silence("silent")
        self.now += RETURN_LIMIT - 1
        self.assertEqual([], self.losses.take_due())
        self.now += 1
        self.assertEqual(["silent"], self.losses.take_due())

    def test_one_that_is_back_in_time_is_never_told_of(self) -> None:
        self.lose_in_silence("silent")
        self.losses.note_back("silent")
        self.now += RETURN_LIMIT
        self.assertEqual([], self.losses.take_due())
