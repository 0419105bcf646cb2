"""Whose the volumes of a pool are, also when the records were set back."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from testtools import TestCase

from drivers.errors import BadDisk, CommandFailed, CommandTimedOut, SnapshotMissing, VmDiskMissing
from drivers.snapshot.disks import Records
from drivers.snapshot.thinpool import ThinPool
from drivers.snapshot.thinvolumes import Snapshot, ThinDisk, Volumes, volume_gone
from tests.unit.virtman.scene import folder_for


def refusal(why: str) -> CommandFailed:
    return CommandFailed(["dmsetup", "message"], 1, "", f"message ioctl on virtman-pool failed: {why}")


class Killed(BaseException):
    """The agent was killed."""


class Pool:
    """The volumes of a pool, as the kernel answers of them."""

    def __init__(self) -> None:
        self.volumes: set[int] = set()
        self.copies: dict[int, int] = {}
        """Of which volume each was made that is one's copy."""
        self.answers = True
        self.refuses = ""
        """Why it does nothing that it is told."""
        self.kills = (0, False)
        """At which message from now on the agent is killed, and whether that is before the pool has done it."""
        self.still = False
        """Whether nobody writes to the disk."""

    def tell(self, text: str) -> None:
        if not self.answers:
            raise CommandTimedOut(["dmsetup", "message"], 60, "", "")
        if self.refuses:
            raise refusal(self.refuses)
        messages, before = self.kills
        self.kills = (messages - 1, before)
        if messages != 1 or not before:
            self.do(*text.split())
        if messages == 1:
            raise Killed

    def do(self, verb: str, number: str, origin: str = "") -> None:
        if (verb != "delete") == (int(number) in self.volumes):
            raise refusal("No data available" if verb == "delete" else "File exists")
        if verb == "create_snap":
            if int(origin) not in self.volumes:
                raise refusal("No data available")
            self.copies[int(number)] = int(origin)
        self.volumes ^= {int(number)}

    @contextmanager
    def stilled(self) -> Iterator[None]:
        self.still = True
        try:
            yield
        finally:
            self.still = False


class PoolCase(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = folder_for(self)
        self.records = Records(self.folder, ThinDisk)
        self.pool = Pool()
        self.volumes = Volumes(self.records, self.pool.tell)

    def drawing(self, *draws: int) -> Volumes:
        """Volumes whose random numbers are these, if any are named."""
        return Volumes(self.records, self.pool.tell, iter(draws).__next__) if draws else self.volumes

    def make(self, vm: str, *draws: int) -> ThinDisk:
        self.records.write(vm, ThinDisk(0, 1 << 20, "/dev/image", made=False))
        return self.drawing(*draws).make(vm)


class DiskTest(PoolCase):
    def test_it_is_written_down_as_made(self) -> None:
        disk = self.make("a")
        self.assertEqual((disk, {disk.number}), (self.volumes.of("a"), self.pool.volumes))
        self.assertTrue(disk.made)
        self.assertTrue(self.volumes.is_made("a"))

    def test_a_number_of_another_record_is_not_taken_though_the_pool_has_lost_its_volume(self) -> None:
        self.make("a", 7)
        self.pool.volumes.clear()
        self.assertEqual(8, self.make("b", 7, 8).number)

    def test_a_volume_that_is_there_already_is_nobodys_new_disk(self) -> None:
        self.pool.volumes = {7}
        self.assertEqual(8, self.make("b", 7, 8).number)
        self.assertEqual({7, 8}, self.pool.volumes)

    def test_what_was_never_made_costs_nobody_a_volume(self) -> None:
        self.pool.volumes = {0, 1, 2}
        self.pool.answers = False
        self.assertRaises(CommandTimedOut, self.make, "b", 2)
        self.pool.answers = True
        self.volumes.delete(self.records.read("b"))
        self.assertEqual({0, 1, 2}, self.pool.volumes)

    def test_one_whose_making_was_cut_off_is_no_disk(self) -> None:
        self.records.write("a", replace(self.make("a"), made=False))
        self.assertRaises(VmDiskMissing, self.volumes.of, "a")
        self.assertRaises(VmDiskMissing, self.volumes.of, "none")
        self.assertFalse(self.volumes.is_made("none"))

    def test_a_volume_that_the_pool_does_not_have_is_told(self) -> None:
        disk = self.make("a", 7)
        self.assertIsInstance(volume_gone("a", disk, refusal("No data available")), BadDisk)
        other = refusal("Device or resource busy")
        self.assertIs(other, volume_gone("a", disk, other))


class SnapshotCase(PoolCase):
    """A VM ``a`` whose volume is 7, with what the pool and the records say of it."""

    def setUp(self) -> None:
        super().setUp()
        self.make("a", 7)

    def take(self, snapshot: str, *draws: int) -> None:
        self.drawing(*draws).take("a", snapshot, self.pool.stilled)

    def numbers(self) -> dict[str, int]:
        return {name: snapshot.number for name, snapshot in self.volumes.of("a").snapshots.items()}

    def assert_nothing_leaked(self) -> None:
        """The pool has the volumes of the disk and its snapshots, which are all there, and no others."""
        disk = self.records.read("a")
        self.assertEqual({disk.number, *self.numbers().values()}, self.pool.volumes)
        self.assertEqual((), disk.unused)

    def killed(self, call: Callable[[], None]) -> Iterator[str]:
        """After the death of the agent before and after each message of the call; the state before it is restored."""
        record, volumes = self.records.read("a"), set(self.pool.volumes)
        for before in (True, False):
            for message in itertools.count(1):
                self.pool.kills = (message, before)
                try:
                    call()
                except Killed:
                    yield f"message {message}, {before}"
                else:
                    self.assertGreater(message, 1)
                    break
                finally:
                    self.pool.kills = (0, False)
                self.pool.volumes = set(volumes)
                self.records.write("a", record)
            self.pool.volumes = set(volumes)
            self.records.write("a", record)


class TakeTest(SnapshotCase):
    def test_a_snapshot_is_a_copy_of_the_volume_as_large_as_the_disk(self) -> None:
        self.take("one", 8)
        self.assertEqual({"one": Snapshot(8, 1 << 20)}, self.volumes.of("a").snapshots)
        self.assertEqual(({7, 8}, {8: 7}), (self.pool.volumes, self.pool.copies))

    def test_one_that_is_there_is_not_taken_again(self) -> None:
        self.take("one", 8)
        self.take("one", 9)
        self.assertEqual({"one": 8}, self.numbers())
        self.assert_nothing_leaked()

    def test_the_volume_is_copied_while_nobody_writes_and_nothing_else_is_done_then(self) -> None:
        told: list[tuple[str, bool, tuple[int, ...]]] = []

        def tell(text: str) -> None:
            told.append((text, self.pool.still, self.records.read("a").unused))
            self.pool.tell(text)

        self.records.write("a", replace(self.records.read("a"), unused=(9,)))
        Volumes(self.records, tell, iter([8]).__next__).take("a", "one", self.pool.stilled)
        self.assertEqual([("delete 9", False, (9,)), ("create_snap 8 7", True, (8,))], told)

    def test_a_volume_of_a_snapshot_is_nobodys_new_disk_or_snapshot(self) -> None:
        self.take("one", 8)
        self.pool.volumes.remove(8)
        self.assertEqual(9, self.make("b", 7, 8, 9).number)
        self.take("two", 7, 8, 9, 10)
        self.assertEqual({"one": 8, "two": 10}, self.numbers())

    def test_a_volume_in_no_record_is_not_deleted_when_no_free_number_was_found(self) -> None:
        self.pool.volumes.add(12)
        self.assertRaises(BadDisk, self.take, "one", *[12] * 16)
        self.volumes.drop("a", "one")
        self.assertEqual({7, 12}, self.pool.volumes)

    def test_one_that_was_cut_off_is_no_snapshot_and_is_taken_by_the_next_call(self) -> None:
        for step in self.killed(lambda: self.take("one")):
            self.assertEqual({}, self.numbers(), step)
            self.assertRaises(SnapshotMissing, self.volumes.revert, "a", "one")
            self.take("one")
            self.assert_nothing_leaked()


class KeptCase(SnapshotCase):
    """The disk has grown since its snapshot."""

    def setUp(self) -> None:
        super().setUp()
        self.take("one", 8)
        self.records.write("a", replace(self.records.read("a"), size=2 << 20))


class RevertTest(KeptCase):
    def test_the_disk_gets_a_copy_and_the_size_of_the_snapshot(self) -> None:
        self.volumes.revert("a", "one")
        disk = self.volumes.of("a")
        self.assertEqual((8, 1 << 20), (self.pool.copies[disk.number], disk.size))
        self.assertEqual({"one": 8}, self.numbers())
        self.assert_nothing_leaked()

    def test_one_that_was_cut_off_has_the_old_disk_or_the_new_and_is_done_by_the_next_call(self) -> None:
        for step in self.killed(lambda: self.volumes.revert("a", "one")):
            disk = self.volumes.of("a")
            self.assertIn(disk.number, self.pool.volumes, step)
            self.assertEqual((7, 2 << 20) if disk.number == 7 else (disk.number, 1 << 20), (disk.number, disk.size))
            self.volumes.revert("a", "one")
            self.assertEqual(8, self.pool.copies[self.volumes.of("a").number], step)
            self.assert_nothing_leaked()


class CloneTest(KeptCase):
    def clone(self, *draws: int) -> None:
        self.drawing(*draws).clone("a", "one", "b")

    def test_it_is_a_disk_over_the_same_image_with_a_copy_of_the_snapshot(self) -> None:
        self.clone(7, 8, 9)
        self.assertEqual(ThinDisk(9, 1 << 20, "/dev/image", made=True), self.volumes.of("b"))
        self.assertEqual(({7, 8, 9}, 8), (self.pool.volumes, self.pool.copies[9]))
        self.assertEqual(({"one": 8}, 7), (self.numbers(), self.volumes.of("a").number))

    def test_one_that_was_cut_off_is_no_disk_and_is_deleted_with_its_volume(self) -> None:
        for step in self.killed(self.clone):
            self.assertFalse(self.volumes.is_made("b"), step)
            self.assertFalse({7, 8} & set(self.records.read("b").unused), step)
            self.assertEqual(1, len(self.records.read("b").unused), step)
            self.volumes.delete(self.records.read("b"))
            self.assertEqual({7, 8}, self.pool.volumes, step)

    def test_a_snapshot_that_the_pool_has_lost_is_told_of(self) -> None:
        self.pool.volumes.remove(8)
        self.assertIn("its volume 8 is gone", str(self.assertRaises(BadDisk, self.clone)))

    def test_of_no_disk_or_snapshot_nothing_is_written_down(self) -> None:
        self.assertRaises(SnapshotMissing, self.volumes.clone, "a", "two", "b")
        self.assertRaises(VmDiskMissing, self.volumes.clone, "c", "one", "b")
        self.assertEqual({"a"}, set(self.records.all()))


class DropTest(SnapshotCase):
    def setUp(self) -> None:
        super().setUp()
        self.take("one", 8)
        self.take("two", 9)

    def test_one_that_was_cut_off_is_no_snapshot_and_is_done_by_the_next_call(self) -> None:
        for step in self.killed(lambda: self.volumes.drop("a", "one")):
            self.assertEqual({"two": 9}, self.numbers(), step)
            self.volumes.drop("a", "one")
            self.assert_nothing_leaked()

    def test_a_disk_is_deleted_with_all_that_was_made_for_it(self) -> None:
        self.pool.volumes |= {10, 11, 12}
        self.records.write("a", replace(self.records.read("a"), unused=(10, 11)))
        for _ in range(2):
            self.volumes.delete(self.records.read("a"))
            self.assertEqual({12}, self.pool.volumes)


class RecordTest(SnapshotCase):
    def test_damaged_snapshots_are_told_of(self) -> None:
        sound = json.loads(self.records.path("a").read_text())
        for snapshots in ([1], {"one": 1}, {"one": {"number": 1}}, 1):
            self.records.path("a").write_text(json.dumps({**sound, "snapshots": snapshots}))
            self.assertRaises(BadDisk, self.records.read, "a")


class LostTest(PoolCase):
    def test_a_pool_is_lost_with_any_of_its_files(self) -> None:
        files, pool = {"meta": b"superblock", "data": b"data"}, ThinPool(self.folder, 1, 1)
        for name, content in files.items():
            (self.folder / name).write_bytes(content)
        self.assertFalse(pool.is_lost())
        for name, content in files.items():
            file = self.folder / name
            for bad in (b"", None):
                file.unlink() if bad is None else file.write_bytes(bad)
                self.assertTrue(pool.is_lost(), (name, bad))
            file.write_bytes(content)
        (self.folder / "meta").write_bytes(bytes(1 << 16))
        self.assertTrue(pool.is_lost(), "blank metadata are new ones")
