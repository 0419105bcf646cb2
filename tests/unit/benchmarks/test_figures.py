"""Figures made of measurements."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from testtools import TestCase

from benchmarks.figures import percentile, spread

values_strategy = st.lists(st.floats(0, 1e6), min_size=1)


class PercentileTest(TestCase):
    def test_it_is_a_value_that_was_measured(self) -> None:
        self.assertEqual(2.0, percentile([3.0, 1.0, 2.0, 10.0], 50))

    def test_p99_of_few_values_is_the_largest(self) -> None:
        self.assertEqual(10.0, percentile([3.0, 1.0, 2.0, 10.0], 99))

    @given(values_strategy, st.integers(1, 100))
    def test_that_share_of_the_values_does_not_exceed_it(self, values: list[float], percent: int) -> None:
        found = percentile(values, percent)
        self.assertGreaterEqual(sum(value <= found for value in values) * 100, percent * len(values))


class SpreadTest(TestCase):
    def test_it_goes_from_the_least_to_the_largest(self) -> None:
        values = [float(number) for number in range(1, 101)]
        self.assertEqual({"n": 100, "min": 1.0, "median": 50.0, "p95": 95.0, "max": 100.0}, spread(values))
