"""How boots of several hosts become one boot set."""

from __future__ import annotations

import json

from testtools import TestCase

from volt.bootsets import GRAIN, LONGEST, MOST_TEXT, merged, text_of


def grains(*runs: tuple[int, int]) -> list[list[int]]:
    return [[begin * GRAIN, end * GRAIN] for begin, end in runs]


class Merging(TestCase):
    """`volt.bootsets.merged`."""

    def test_what_both_read_comes_first_in_the_order_that_is_known(self) -> None:
        known, new = grains((9, 10), (3, 6)), grains((7, 8), (4, 6), (9, 10))
        self.assertEqual(grains((9, 10), (4, 6), (3, 4), (7, 8)), merged(known, new))

    def test_the_first_boot_is_what_is_known(self) -> None:
        self.assertEqual(grains((5, 6), (0, 2)), merged([], [[5 * GRAIN + 7, 6 * GRAIN], [0, GRAIN + 1]]))

    def test_the_same_again_changes_nothing(self) -> None:
        known = grains((9, 10), (3, 6))
        self.assertEqual(known, merged(known, known))

    def test_a_boot_set_ends_at_its_limit(self) -> None:
        for known in ([], grains((0, 1))):
            self.assertEqual([[0, LONGEST]], merged(known, [[0, 1 << 62]]))


class Limit(TestCase):
    """`volt.bootsets.text_of`."""

    def test_the_first_ranges_are_kept_as_far_as_there_is_room(self) -> None:
        ranges = grains(*((2 * number, 2 * number + 1) for number in range(10_000)))
        text = text_of(ranges)
        self.assertTrue(MOST_TEXT - 100 < len(text) <= MOST_TEXT, len(text))
        kept = json.loads(text)
        self.assertEqual(ranges[: len(kept)], kept)
        self.assertEqual("[]", text_of([]))
