"""What the benchmark of the data path makes of its measurements."""

from __future__ import annotations

import itertools
import json

from testtools import TestCase

from benchmarks import fio
from benchmarks.errors import Failed
from benchmarks.kernel_pause import waited_after
from benchmarks.kernelpath import busy
from benchmarks.pathreads import (
    ALL,
    COLUMNS,
    LARGE,
    LEVELS,
    ROUNDS,
    SINGLE,
    Measured,
    cold_and_warm,
    image_bytes,
    places,
)


class PlacesTest(TestCase):
    def test_no_two_reads_share_a_place_and_all_are_in_the_image(self) -> None:
        kinds = list(ALL) * ROUNDS * len(LEVELS) * 3
        taken = list(itertools.islice(places(), len(kinds)))
        ends = [place + reads.room for place, reads in zip(taken, kinds, strict=True)]
        self.assertEqual((taken[1:], image_bytes(3)), (ends[:-1], ends[-1]))

    def test_large_reads_are_in_order_and_small_ones_scattered(self) -> None:
        self.assertEqual(("read", "randread"), (LARGE.options(0)["rw"], SINGLE.options(0)["rw"]))


class RoundsTest(TestCase):
    def test_each_round_reads_anew_and_again_at_a_place_of_its_own(self) -> None:
        read = []

        def measure(state: str, place: int) -> Measured:
            read.append((state, place))
            seconds = 90.0 if place == 20 else place / 10  # something else ran meanwhile
            return Measured(1, 3, state, "4 KiB", seconds, 2 * seconds, {"child": 1.0 + len(read) % 2}, 16.0)

        where = iter([10, 20, 30, 40])
        cold, warm = cold_and_warm(where, measure)
        self.assertEqual([(state, place) for place in (10, 20, 30) for state in ("cold", "warm")], read)
        self.assertEqual(40, next(where))
        self.assertEqual(Measured(1, 3, "cold", "4 KiB", 3.0, 6.0, {"child": 2.0}, 16.0), cold)
        self.assertEqual(Measured(1, 3, "warm", "4 KiB", 3.0, 6.0, {"child": 1.0}, 16.0), warm)


class FiguresTest(TestCase):
    def test_the_processor_works_for_programs_kernel_and_interrupts_and_not_while_it_waits(self) -> None:
        self.assertEqual(1.25, busy("cpu  100 1 10 5000 700 4 10 0 0 0"))

    def test_a_ratio_is_against_the_bare_file(self) -> None:
        measured = Measured(1, 3, "warm", "4 KiB", 0.002, 0.001, {"child": 1.5}, 16.0)
        row = ["1 ms, 3 levels, warm, 4 KiB", "2000", "2.00", "1.50", "", "16"]
        self.assertEqual((row, 2.0), (measured.row(), measured.figures()["ratio"]))
        self.assertEqual(len(COLUMNS), len(row))


class FioTest(TestCase):
    def test_reads_share_the_time_of_those_beside_them(self) -> None:
        said = json.dumps({"jobs": [{"error": 0, "job_runtime": 1500, "read": {"lat_ns": {"mean": 16e6}}}]})
        self.assertEqual((0.001, 1.5), (fio.read_seconds(said, 16), fio.seconds(said)))

    def test_an_error_is_told(self) -> None:
        self.assertRaises(Failed, fio.seconds, json.dumps({"jobs": [{"error": 5}]}))


class PauseTest(TestCase):
    def test_a_read_that_waits_at_the_end_of_a_pause_counts_from_there(self) -> None:
        self.assertEqual(1.5, waited_after([[3.0, 0.1], [9.0, 2.5], [11.5, 0.5]], 10.0))
        self.assertEqual(9.0, waited_after([[3.0, 0.1], [9.0, 2.5], [11.5, 9.0]], 10.0), "so does a later one")
        self.assertRaises(Failed, waited_after, [[3.0, 0.1]], 10.0)
