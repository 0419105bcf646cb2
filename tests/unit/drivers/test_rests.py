"""What is not tried again for a while."""

from __future__ import annotations

from testtools import TestCase

from drivers.cache.rests import Rests, growing


class RestsTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.now = 1000.0
        self.rests = Rests(lambda: self.now)

    def lasting(self) -> list[str]:
        return [name for name in ("one", "two") if self.rests.lasts(name)]

    def test_each_lasts_its_own_time(self) -> None:
        self.assertEqual([], self.lasting())
        self.rests.begin("one", 10)
        self.rests.begin("two", 20)
        self.now += 9.5
        self.assertEqual(["one", "two"], self.lasting())
        self.now += 0.5
        self.assertEqual(["two"], self.lasting())
        self.now += 10
        self.assertEqual([], self.lasting())

    def test_all_may_be_ended(self) -> None:
        self.rests.begin("one", 10)
        self.rests.begin("two", 10)
        self.rests.clear()
        self.assertEqual([], self.lasting())

    def test_each_is_twice_as_long_as_the_one_before_up_to_a_limit_for_ever(self) -> None:
        self.assertEqual([30.0, 60.0, 120.0], [growing(times, 30.0, 3600.0) for times in range(3)])
        self.assertEqual([1920.0, 3600.0], [growing(times, 30.0, 3600.0) for times in (6, 7)])
        self.assertEqual(3600.0, growing(10**6, 30.0, 3600.0))

    def test_one_may_begin_again_and_be_ended(self) -> None:
        self.rests.begin("one", 10)
        self.rests.begin("two", 10)
        self.now += 5
        self.rests.begin("one", 10)
        self.rests.end("two")
        self.assertEqual(["one"], self.lasting())
        self.now += 9
        self.assertEqual(["one"], self.lasting())
        self.rests.end("two")
