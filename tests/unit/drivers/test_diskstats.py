"""How long reads of disks have been stalled, by what the kernel counts."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

from testtools import TestCase

from drivers.kernel import diskstats
from drivers.kernel.diskstats import Counts, StallClock, read_counts
from tests.unit.virtman.scene import folder_for

DISK = "8:0"


class CountsTest(TestCase):
    def test_completed_reads_and_requests_under_way(self) -> None:
        file = folder_for(self) / "stat"
        file.write_text(
            "     332        0    42496     5981        0        0        0        0        1     5408     5981\n"
        )
        with mock.patch.object(diskstats, "Path", return_value=file):
            self.assertEqual((332, 1), read_counts(DISK))

    def test_disks_of_this_machine_are_counted_and_others_are_not(self) -> None:
        there = next(Path("/sys/dev/block").iterdir()).name
        self.assertIsNotNone(read_counts(there))
        self.assertIsNone(read_counts("1048575:0"))


class StallClockTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.counts: Counts | None = None
        self.clock = StallClock(lambda _disk: self.counts)
        self.now = 0.0

    def stalls(self, *looks: tuple[float, int, int]) -> list[float]:
        """The stall at each look: so many seconds after the look before, with so many reads completed and under way."""
        found = []
        for seconds, reads, under_way in looks:
            self.now += seconds
            self.counts = reads, under_way
            found.append(self.clock.measure([DISK], self.now)[DISK])
        return found

    def test_reads_of_which_none_completes(self) -> None:
        self.assertEqual([0, 0.25, 0.75], self.stalls((0, 5, 1), (0.25, 5, 2), (0.5, 5, 2)))

    def test_each_completed_read_ends_a_stall(self) -> None:
        self.assertEqual([0, 0, 0, 1], self.stalls((1, 5, 4), (1, 6, 4), (1, 7, 4), (1, 7, 4)))

    def test_an_idle_disk_is_not_stalled_nor_one_that_has_just_begun(self) -> None:
        self.assertEqual([0, 0, 0, 0], self.stalls((1, 5, 0), (1, 5, 0), (1, 5, 1), (1, 5, 0)))

    def test_a_disk_that_is_gone_is_forgotten(self) -> None:
        self.stalls((1, 5, 1))
        self.counts = None
        self.assertEqual({}, self.clock.measure([DISK], self.now + 1))
        self.assertEqual([0], self.stalls((2, 5, 1)))
