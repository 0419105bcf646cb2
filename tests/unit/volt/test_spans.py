"""Ranges that hosts lack, as few as fit into a message."""

from __future__ import annotations

from testtools import TestCase

from volt.spans import MOST_RANGES, united


class SpansTest(TestCase):
    def test_what_any_of_them_has_is_in_it_once_and_in_order(self) -> None:
        self.assertEqual([], united([]))
        self.assertEqual([[0, 20], [30, 40]], united([[[30, 40], [5, 20]], [[0, 10], [35, 38]]]))
        self.assertEqual([[0, 20]], united([[[0, 10]], [[10, 20]]]))

    def test_of_too_many_the_nearest_are_joined(self) -> None:
        many = [[10 * number, 10 * number + 5] for number in range(MOST_RANGES)]
        last = [10 * MOST_RANGES - 4, 10 * MOST_RANGES]  # one byte after the one before
        self.assertEqual([*many[:-1], [many[-1][0], last[1]]], united([many, [last]]))
        joined = united([[[10 * number, 10 * number + 5] for number in range(3 * MOST_RANGES)]])
        self.assertEqual((MOST_RANGES, 0, 30 * MOST_RANGES - 5), (len(joined), joined[0][0], joined[-1][1]))
