"""Parents that hung, and those that took over."""

from __future__ import annotations

from testtools import TestCase

from drivers.attach.hangs import REST, Hangs


class HangsCase(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.now = 1000.0
        self.hangs: Hangs[str] = Hangs(lambda: self.now)


class RestTest(HangsCase):
    def rest(self) -> float:
        """Have a parent hang, and wait until its rest is over. Returns how long that was."""
        began = self.now
        self.hangs.note("hung")
        while self.hangs.rests("hung"):
            self.now += 1
        return self.now - began

    def test_it_comes_last_as_long_as_it_rests(self) -> None:
        self.hangs.note("hung")
        self.assertEqual(["b", "a", "hung"], self.hangs.in_order(["hung", "b", "a"]))
        self.now += REST - 1
        self.assertEqual(["b", "hung"], self.hangs.in_order(["hung", "b"]))
        self.now += 1
        self.assertEqual(["hung", "b"], self.hangs.in_order(["hung", "b"]))

    def test_each_rest_is_twice_as_long_as_the_one_before(self) -> None:
        self.assertEqual([60, 120, 240, 480, 960, 1920, 3600, 3600], [self.rest() for _ in range(8)])


class HeirTest(HangsCase):
    def setUp(self) -> None:
        super().setUp()
        self.reads = {"a": 10, "b": 20, "c": 30, "d": 40}
        self.hangs.note("a")
        self.hangs.note_heir("b", self.reads["b"])

    def successors(self, parent: str) -> list[str]:
        return self.hangs.successors(parent, [other for other in self.reads if other != parent], self.reads.__getitem__)

    def test_one_that_answered_nothing_is_left_only_for_one_that_neither_hung_nor_took_over(self) -> None:
        self.assertEqual(["c", "d"], self.successors("b"))
        self.hangs.note_heir("c", self.reads["c"])
        self.assertEqual(["d"], self.successors("b"))
        self.hangs.note("d")
        self.assertEqual([], self.successors("b"))

    def test_one_that_has_answered_since_is_left_for_any(self) -> None:
        self.reads["b"] += 1
        self.assertEqual(["a", "c", "d"], self.successors("b"))
