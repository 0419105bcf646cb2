"""Whose the volumes of a pool are, also when the records were set back."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from testtools import TestCase

from drivers.errors import BadDisk, CommandFailed, CommandTimedOut, SnapshotMissing
from drivers.snapshot.disks import Records
from drivers.snapshot.thinvolumes import NUMBERS, ThinDisk, Volumes, is_lost, volume_gone


def refusal(why: str) -> CommandFailed:
    return CommandFailed(["dmsetup", "message"], 1, "", f"message ioctl on virtman-pool failed: {why}")


class Pool:
    """The volumes of a pool, as the kernel answers of them."""

    def __init__(self) -> None:
        self.volumes: set[int] = set()
        self.answers = True
        self.refuses = ""
        """Why it does nothing that it is told."""

    def tell(self, text: str) -> None:
        verb, number = text.split()
        if not self.answers:
            raise CommandTimedOut(["dmsetup", "message"], 60, "", "")
        if self.refuses:
            raise refusal(self.refuses)
        if (verb == "create_thin") == (int(number) in self.volumes):
            raise refusal("File exists" if verb == "create_thin" else "No data available")
        self.volumes ^= {int(number)}


class PoolCase(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)
        self.records = Records(self.folder, ThinDisk)
        self.pool = Pool()
        self.volumes = Volumes(self.records, self.pool.tell)

    def make(self, vm: str, *draws: int) -> ThinDisk:
        self.records.write(vm, ThinDisk(0, 1 << 20, "/dev/image", made=False))
        if draws:
            return Volumes(self.records, self.pool.tell, iter(draws).__next__).make(vm)
        return self.volumes.make(vm)


class MakeTest(PoolCase):
    def test_it_is_written_down_as_made(self) -> None:
        disk = self.make("a")
        self.assertEqual((disk, {disk.number}), (self.volumes.of("a"), self.pool.volumes))
        self.assertTrue(disk.made)
        self.assertTrue(self.volumes.is_made("a"))

    def test_numbers_are_no_series(self) -> None:
        numbers = {self.make(f"vm{at}").number for at in range(20)}
        self.assertTrue(all(0 <= number < NUMBERS for number in numbers))
        self.assertGreater(max(numbers), 1 << 16)

    def test_a_number_of_another_record_is_not_taken_though_the_pool_has_lost_its_volume(self) -> None:
        self.make("a", 7)
        self.pool.volumes.clear()
        self.assertEqual(8, self.make("b", 7, 8).number)

    def test_a_volume_that_is_there_already_is_nobodys_new_disk(self) -> None:
        self.pool.volumes = {7}
        self.assertEqual(8, self.make("b", 7, 8).number)
        self.assertEqual({7, 8}, self.pool.volumes)

    def test_it_is_not_tried_for_ever(self) -> None:
        self.pool.volumes = {7}
        self.assertRaises(BadDisk, self.make, "b", *[7] * 1000)
        self.assertFalse(self.volumes.is_made("b"))

    def test_other_refusals_are_told(self) -> None:
        self.pool.answers = False
        self.assertRaises(CommandTimedOut, self.make, "a")
        self.pool.answers, self.pool.refuses = True, "Device or resource busy"
        self.assertRaises(CommandFailed, self.make, "a")
        self.assertFalse(self.volumes.is_made("a"))


class DeleteTest(PoolCase):
    def test_what_was_never_made_costs_nobody_a_volume(self) -> None:
        self.pool.volumes = {0, 1, 2}
        self.pool.answers = False
        self.assertRaises(CommandTimedOut, self.make, "b", 2)
        self.pool.answers = True
        self.volumes.delete(self.records.read("b"))
        self.assertEqual({0, 1, 2}, self.pool.volumes)

    def test_it_may_be_gone(self) -> None:
        disk = self.make("a")
        for _ in range(2):
            self.volumes.delete(disk)
        self.assertEqual(set(), self.pool.volumes)

    def test_other_refusals_are_told(self) -> None:
        disk = self.make("a")
        self.pool.answers = False
        self.assertRaises(CommandTimedOut, self.volumes.delete, disk)
        self.pool.answers, self.pool.refuses = True, "Device or resource busy"
        self.assertRaises(CommandFailed, self.volumes.delete, disk)


class OpenTest(PoolCase):
    def test_one_whose_making_was_cut_off_is_no_disk(self) -> None:
        self.records.write("a", replace(self.make("a"), made=False))
        self.assertRaises(SnapshotMissing, self.volumes.of, "a")
        self.assertRaises(SnapshotMissing, self.volumes.of, "none")
        self.assertFalse(self.volumes.is_made("none"))

    def test_a_record_of_the_release_before_counts_as_made(self) -> None:
        self.records.path("a").write_text(json.dumps({"number": 1, "size": 1 << 20, "origin": "/dev/image"}))
        self.assertEqual(ThinDisk(1, 1 << 20, "/dev/image", made=True), self.volumes.of("a"))

    def test_a_volume_that_the_pool_does_not_have_is_told(self) -> None:
        disk = self.make("a", 7)
        self.assertIsInstance(volume_gone("a", disk, refusal("No data available")), BadDisk)
        other = refusal("Device or resource busy")
        self.assertIs(other, volume_gone("a", disk, other))


class LostTest(PoolCase):
    def test_a_pool_is_lost_with_any_of_its_files(self) -> None:
        files = {"meta": b"superblock", "data": b"data"}
        for name, content in files.items():
            (self.folder / name).write_bytes(content)
        self.assertFalse(is_lost(self.folder))
        for name, content in files.items():
            file = self.folder / name
            for bad in (b"", None):
                file.unlink() if bad is None else file.write_bytes(bad)
                self.assertTrue(is_lost(self.folder), (name, bad))
            file.write_bytes(content)
        (self.folder / "meta").write_bytes(bytes(1 << 16))
        self.assertTrue(is_lost(self.folder), "blank metadata are new ones")
