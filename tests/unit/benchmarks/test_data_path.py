"""What the benchmark of the data path makes of its measurements."""

from __future__ import annotations

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
    Places,
    cold_and_warm,
    image_bytes,
)


class PlacesTest(TestCase):
    def test_no_two_reads_share_a_place_and_all_are_in_the_image(self) -> None:
        kinds = [reads for reads in ALL for _ in range(ROUNDS)] * len(LEVELS) * 3
        places = Places()
        taken = [places.take(reads) for reads in kinds]
        ends = [place + reads.room for place, reads in zip(taken, kinds, strict=True)]
        self.assertEqual((taken[1:], image_bytes(3)), (ends[:-1], ends[-1]))

    def test_large_reads_are_in_order_and_small_ones_scattered(self) -> None:
        self.assertEqual(("read", "randread"), (LARGE.options(0)["rw"], SINGLE.options(0)["rw"]))


class RoundsTest(TestCase):
    def test_each_round_reads_anew_and_again_at_a_place_of_its_own(self) -> None:
        read = []

        def measure(state: str, place: int) -> Measured:
            read.append((state, place))
            seconds = 90.0 if place == SINGLE.room else 1.0 + place / SINGLE.room  # something else ran meanwhile
            return Measured(1, 3, state, "4 KiB", seconds, 2 * seconds, {"child": 1.0 + len(read) % 2}, 16.0)

        places = Places()
        cold, warm = cold_and_warm(places, SINGLE, measure)
        self.assertEqual([(state, at * SINGLE.room) for at in range(ROUNDS) for state in ("cold", "warm")], read)
        self.assertEqual(ROUNDS * SINGLE.room, places.take(SINGLE))
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
