"""Private disks as device-mapper snapshots over a device of known content."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from drivers.base import Device, Place
from drivers.errors import BadDisk, BadName, DiskInUse, NoSpace, NotPossible, SnapshotMissing, VmDiskMissing
from drivers.kernel import devmapper, loopdev
from drivers.snapshot.disks import DISK_PREFIX
from drivers.snapshot.dmsnapshot import BASE_PREFIX, DmSnapshotDisks
from tests.contracts import drivers as contracts
from tests.kernel.inside import disks
from tests.kernel.inside.disks import MIB, SIZE, DiskCase, write
from tests.kernel.inside.filesystems import fill, small_file_system
from tests.kernel.inside.killing import killed_at

CHUNK = 4096
PER_AREA = CHUNK // 16
"""Chunks that one table of a store names."""

PROGRAMS = 3
"""How many a creation, a deletion, or a rename runs at least: for two maps and a loop device."""


class SnapshotCase(DiskCase):
    def new_driver(self) -> DmSnapshotDisks:
        return DmSnapshotDisks(Place(self.folder, self.folder, group=disks.GROUP))

    def crash(self) -> None:
        for name in sorted(devmapper.names("virtman-")):  # disks come before their bases
            devmapper.remove(name)
        for store in (self.folder / "dmsnapshot").glob("*.store"):
            loopdev.detach(store)
        self.driver = self.new_driver()

    def left(self) -> list[str]:
        return [path.name for path in (self.folder / "dmsnapshot").iterdir()]


class OtherFilesTest(SnapshotCase):
    def test_a_disk_over_a_store_that_the_folder_has_no_more_is_refused(self) -> None:
        self.create()
        kept = (self.folder / "dmsnapshot").rename(self.folder / "kept")
        shutil.copytree(kept, self.folder / "dmsnapshot")
        self.assertIn("another file", str(self.assertRaises(BadDisk, self.driver.open, "vm1")))
        shutil.rmtree(self.folder / "dmsnapshot")
        kept.rename(self.folder / "dmsnapshot")
        self.assertEqual(self.content, self.opened().read_bytes())


class EveryDriverTest(disks.EveryDriver, SnapshotCase):
    def test_a_new_disk_never_shows_writes_of_one_whose_deletion_was_cut_off(self) -> None:
        write(self.create("vm1"), 0, b"secret" * 1024)
        self.crash()
        (self.folder / "dmsnapshot/vm1.json").unlink()
        self.assertEqual({"vm1"}, self.driver.existing())
        self.assertEqual(self.content, self.create("vm1").read_bytes())


class RenameTest(SnapshotCase):
    def test_a_disk_that_gets_another_name_holds_what_it_held(self) -> None:
        write(self.create(), MIB, b"w" * 512)
        expected = self.content[:MIB] + b"w" * 512 + self.content[MIB + 512 :]
        for _ in range(2):
            self.assertEqual(SIZE, self.driver.rename("vm1", "new").size)
        self.assertEqual(expected, self.opened("new").read_bytes())
        self.assertRaises(VmDiskMissing, self.driver.open, "vm1")
        self.assertEqual(self.content, self.create().read_bytes())
        self.assertRaises(BadDisk, self.driver.rename, "vm1", "new")
        self.driver.delete("vm1")
        self.crash()
        self.assertEqual(expected, self.opened("new").read_bytes())
        self.assertEqual(["new.json", "new.store"], sorted(self.left()))

    def test_a_disk_that_is_in_use_keeps_its_name(self) -> None:
        with self.create().open("rb"):
            self.assertRaises(DiskInUse, self.driver.rename, "vm1", "new")
        self.assertEqual({"vm1"}, self.driver.existing())
        self.assertEqual(self.content, self.opened().read_bytes())


class RefusalTest(SnapshotCase):
    def calls(self, vm: str = "vm1", snapshot: str = "snapshot", new: str = "new") -> dict[str, Callable[[], object]]:
        """All calls of a disk with snapshots."""
        return {
            "resize": lambda: self.driver.resize(vm, 2 * SIZE, None),
            "take": lambda: self.driver.take(vm, snapshot, None),
            "revert": lambda: self.driver.revert(vm, snapshot),
            "clone": lambda: self.driver.clone(vm, snapshot, new),
            "changes": lambda: self.driver.changes(vm, None, None),
            "rename": lambda: self.driver.rename(vm, new),
            "drop": lambda: self.driver.drop(vm, snapshot, None),
            "snapshots": lambda: self.driver.snapshots(vm),
            "reading": lambda: self.driver.reading(vm, snapshot).__enter__(),
        }

    def test_what_only_thin_disks_can_is_refused_with_their_drivers_name_and_changes_nothing(self) -> None:
        path = self.create()
        write(path, 0, b"kept")
        for name in ("resize", "take", "revert", "clone", "changes"):
            self.assertIn("dmthin", str(self.assertRaises(NotPossible, self.calls()[name])))
        self.assertEqual((SIZE, b"kept"), (self.driver.open("vm1").size, path.read_bytes()[:4]))

    def test_a_disk_may_be_given_the_size_that_it_has_and_loses_snapshots_that_it_never_had(self) -> None:
        path = self.create()
        self.assertEqual(path, self.driver.resize("vm1", SIZE, None).path)
        self.driver.drop("vm1", "snapshot", None)
        self.assertEqual(frozenset(), self.driver.snapshots("vm1"))
        self.assertRaises(SnapshotMissing, self.calls()["reading"])

    def test_bad_input_is_told_first(self) -> None:
        for call in self.calls().values():
            self.assertRaises(VmDiskMissing, call)
        self.create()
        for size in (0, SIZE - 512, SIZE + 100):
            self.assertRaises(BadDisk, self.driver.resize, "vm1", size, None)
        for bad in contracts.BAD_NAMES:
            calls = [*self.calls(vm=bad).values()]
            calls += [self.calls(snapshot=bad)[name] for name in ("take", "revert", "clone", "drop", "reading")]
            calls += [self.calls(new=bad)[name] for name in ("clone", "rename")]
            for call in calls:
                self.assertRaises(BadName, call)


class CrashTest(SnapshotCase):
    def test_a_lost_store_or_a_damaged_record_is_told_and_not_replaced(self) -> None:
        self.create("vm1")
        self.crash()
        (self.folder / "dmsnapshot/vm1.store").unlink()
        self.assertRaises(BadDisk, self.driver.open, "vm1")
        self.assertRaises(BadDisk, self.driver.create, "vm1", self.origin, SIZE)
        (self.folder / "dmsnapshot/vm1.json").write_text("{")
        self.assertRaises(BadDisk, self.driver.open, "vm1")

    def test_a_disk_that_the_kernel_gave_up_has_its_writes_when_it_is_opened_again(self) -> None:
        path = self.create("vm1")
        write(path, MIB, b"w" * 4096)
        devmapper.reload(BASE_PREFIX + "vm1", [f"0 {SIZE // 512} error"], read_only=True)
        # Past the page cache, so that nothing is left to be written later.
        dd = ["dd", "if=/dev/zero", f"of={path}", "bs=4096", "count=1", "oflag=direct"]
        self.assertNotEqual(0, subprocess.run(dd, capture_output=True, check=False).returncode)
        self.assertIn("Invalid", devmapper.status(DISK_PREFIX + "vm1"))
        self.crash()
        expected = self.content[:MIB] + b"w" * 4096 + self.content[MIB + 4096 :]
        self.assertEqual(expected, self.opened().read_bytes())

    def test_create_that_was_killed_at_any_step_is_finished_by_the_next(self) -> None:
        for number in self.kill_at_each_step("create", before=True):
            self.assertEqual(self.content[:MIB], self.create(size=MIB).read_bytes(), f"killed before call {number}")
            self.driver.delete("vm1")

    def test_what_was_killed_at_any_step_is_deleted_by_the_next(self) -> None:
        before = self.listing()
        for call in ("create", "delete"):
            for number in self.kill_at_each_step(call, before=False):
                self.driver.delete("vm1")
                self.assertEqual((before, []), (self.listing(), self.left()), f"{call} killed after call {number}")

    def test_rename_that_was_killed_at_any_step_is_finished_by_the_next(self) -> None:
        for number in self.kill_at_each_step("rename", before=False):
            self.driver.rename("vm1", "new")
            self.assertEqual(self.content[:MIB], self.opened("new").read_bytes(), f"killed after call {number}")
            self.driver.delete("new")

    def kill_at_each_step(self, call: str, *, before: bool) -> Iterator[int]:
        """Make the call in another process, which dies before, or after, its first program, its second, …"""
        self.origin = Device(size=MIB, path=self.origin.path)
        for number in itertools.count(1):
            if call != "create":
                self.create(size=MIB)
            code = killed_at(number, partial(self.act, call), self.folder / "killers", before=before)
            if code == 0:
                self.assertGreater(number, PROGRAMS)
                break
            self.assertEqual(-signal.SIGKILL, code)
            yield number
        self.driver.delete("vm1")

    def act(self, call: str) -> None:
        if call == "create":
            self.create(size=MIB)
        elif call == "rename":
            self.driver.rename("vm1", "new")
        else:
            self.driver.delete("vm1")


class SpaceTest(SnapshotCase):
    def test_no_room_for_a_store_is_an_error_that_leaves_nothing(self) -> None:
        small = small_file_system(self, self.folder, "64M")
        fill(small, but=SIZE // 2)  # and a little, which is reserved for root
        driver = DmSnapshotDisks(Place(small, small))
        self.assertRaises(NoSpace, driver.create, "vm1", self.origin, SIZE)
        self.assertEqual(frozenset(), driver.existing())
        self.assertEqual([], list((small / "dmsnapshot").iterdir()))

    def test_writes_go_on_when_the_file_system_is_full(self) -> None:
        small = small_file_system(self, self.folder, "64M")
        driver = DmSnapshotDisks(Place(small, small))
        path = contracts.path_of(driver.create("vm1", self.origin, SIZE))
        self.addCleanup(driver.delete, "vm1")
        fill(small, but=0)
        data = os.urandom(SIZE)
        write(path, 0, data)
        self.assertEqual(data, path.read_bytes())

    def test_a_disk_that_is_written_to_its_last_chunk_is_valid_also_after_a_crash(self) -> None:
        self.driver = DmSnapshotDisks(Place(self.folder, self.folder), chunk=CHUNK)
        image = Device(size=PER_AREA * CHUNK // 2, path=self.origin.path)
        for size in (PER_AREA * CHUNK, 2 * PER_AREA * CHUNK + 512, PER_AREA * CHUNK - 512):
            path = contracts.path_of(self.driver.create("vm1", image, size))
            data = os.urandom(size)
            self.write_all(path, data)
            used, total = devmapper.status(DISK_PREFIX + "vm1").split()[3].split("/")  # else the kernel gave it up
            self.assertEqual(int(used), int(total))
            self.crash()
            self.assertEqual(data, self.opened().read_bytes())
            self.driver.delete("vm1")

    @staticmethod
    def write_all(path: Path, data: bytes) -> None:
        """Every chunk with a write of its own, so that none covers it whole, in a random order."""
        order = list(range(0, len(data), CHUNK // 2))
        random.shuffle(order)
        with path.open("r+b", buffering=0) as file:
            for offset in order:
                os.pwrite(file.fileno(), data[offset : offset + CHUNK // 2], offset)
            os.fsync(file.fileno())
