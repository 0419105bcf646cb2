"""Disks that do not get on with their reads, by what the kernel counts."""

from __future__ import annotations

import errno
import os
from functools import partial
from pathlib import Path

from testtools import TestCase

from drivers.host.keptfiles import KeptFiles
from drivers.kernel.diskstats import Counts, Standstill, counts, parsed

DISK = "8:0"


class CountsTest(TestCase):
    def test_reads_that_came_back_and_requests_under_way(self) -> None:
        text = "     332        0    42496     5981        0        0        0        0        1     5408     5981\n"
        self.assertEqual(Counts(332, 1), parsed(text))

    def test_the_kernel_tells_of_this_machines_disks_that_are_there(self) -> None:
        files = KeptFiles()
        self.addCleanup(files.close)
        there = {path.name for path in Path("/sys/dev/block").iterdir()}
        self.assertNotEqual(set(), there)
        self.assertEqual(there, counts({*there, "1048575:0"}, files.read).keys())

    def test_who_has_no_room_to_look_is_told_so_and_not_that_a_disk_is_gone(self) -> None:
        for code, raises in ((errno.ENOENT, False), (errno.ENODEV, False), (errno.EMFILE, True), (errno.ENOMEM, True)):
            error = OSError(code, os.strerror(code))
            try:
                self.assertEqual((False, {}), (raises, counts([DISK], partial(self.fail_with, error))))
            except OSError as raised:
                self.assertEqual((True, error), (raises, raised))

    @staticmethod
    def fail_with(error: OSError, _file: str) -> str:
        raise error


class StandstillTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.standstill = Standstill()
        self.at = 0.0

    def after(self, seconds: float, reads: int, under_way: int) -> float:
        """For how long the disk has stood still, looked at so much later."""
        self.at += seconds
        return self.standstill.look([DISK], {DISK: Counts(reads, under_way)}, self.at)[DISK]

    def test_reads_of_which_none_comes_back(self) -> None:
        found = [self.after(seconds, 5, under_way) for seconds, under_way in ((0, 1), (0.25, 2), (0.5, 2))]
        self.assertEqual([0, 0.25, 0.75], found)

    def test_a_disk_that_gets_on_begins_anew_with_each_read(self) -> None:
        self.assertEqual([0, 0, 0], [self.after(1, reads, 4) for reads in (5, 6, 7)])
        self.assertEqual(1, self.after(1, 7, 4))

    def test_an_idle_disk_does_not_stand_still_nor_one_from_the_moment_of_its_first_read(self) -> None:
        self.assertEqual([0, 0, 0, 0], [self.after(1, 5, under_way) for under_way in (0, 0, 1, 0)])

    def test_a_disk_that_is_gone_is_not_told_of_and_what_was_known_of_it_is_forgotten(self) -> None:
        self.after(1, 5, 1)
        self.assertEqual({}, self.standstill.look([DISK], {}, self.at + 1))
        self.assertEqual(0, self.after(2, 5, 1))
