"""Private disks as thin volumes over a device of known content."""

from __future__ import annotations

import os
import subprocess

from drivers import devmapper, loopdev
from drivers.base import Device, Place
from drivers.errors import BadDevice, BadDisk, BadName, NoSpace, SnapshotMissing
from drivers.snapshot.disks import DISK_PREFIX
from drivers.snapshot.dmthin import META_BYTES, POOL, DmThinSnapshot
from tests.kernel.inside.disks import MIB, SIZE, DiskCase, fill, small_file_system, write

STEP = 32 * MIB


class ThinCase(DiskCase):
    driver: DmThinSnapshot

    def new_driver(self) -> DmThinSnapshot:
        driver = DmThinSnapshot(Place(self.folder, self.folder), step=STEP)
        self.addCleanup(driver.close)
        return driver

    def crash(self) -> None:
        """The host goes down: no map and no loop device outlives that."""
        self.driver.close()
        for name in sorted(devmapper.names("virtman-"), reverse=True):
            devmapper.remove(name)
        for file in ("data", "meta"):
            loopdev.detach(self.folder / "thin" / file)
        self.driver = self.new_driver()


class CreateTest(ThinCase):
    def test_new_disk_reads_as_the_image(self) -> None:
        self.assertEqual(self.content, self.create().read_bytes())

    def test_writes_stay_in_the_disk(self) -> None:
        one, two = self.create("vm1"), self.create("vm2")
        write(one, 3 * MIB + 512, b"w" * 1024)
        expected = self.content[: 3 * MIB + 512] + b"w" * 1024 + self.content[3 * MIB + 1536 :]
        self.assertEqual(expected, one.read_bytes())
        self.assertEqual(self.content, two.read_bytes())

    def test_larger_disk_ends_in_zeros(self) -> None:
        self.assertEqual(self.content + bytes(4 * MIB), self.create(size=SIZE + 4 * MIB).read_bytes())

    def test_creating_twice_is_creating_once(self) -> None:
        write(self.create(), 0, b"w" * 512)
        self.assertEqual(b"w" * 512, self.create().read_bytes()[:512])

    def test_bad_sizes_names_and_origins_change_nothing(self) -> None:
        for size in (SIZE - 512, SIZE + 100):
            self.assertRaises(BadDisk, self.driver.create, "vm1", self.origin, size)
        self.assertRaises(BadName, self.driver.create, "a/b", self.origin, SIZE)
        self.assertRaises(BadDevice, self.driver.create, "vm1", Device(size=SIZE), SIZE)
        self.assertEqual(frozenset(), self.driver.existing().names)
        self.assertFalse(devmapper.exists(POOL))


class DeleteTest(ThinCase):
    def test_deleting_the_last_disk_leaves_nothing(self) -> None:
        before = self.listing()
        self.create("vm1")
        self.create("vm2")
        self.driver.delete("vm1")
        self.assertEqual({"vm2"}, self.driver.existing().names)
        self.driver.delete("vm2")
        self.assertEqual(before, self.listing())
        self.assertEqual([], list((self.folder / "thin").iterdir()))

    def test_deleting_what_is_not_there_is_fine(self) -> None:
        self.driver.delete("vm1")
        self.assertFalse(devmapper.exists(POOL))

    def test_a_new_disk_never_shows_writes_of_a_deleted_one(self) -> None:
        keep = self.create("keep")
        write(self.create("vm1"), 0, b"secret" * 1024)
        self.driver.delete("vm1")
        self.assertEqual(self.content + bytes(MIB), self.create("vm1", SIZE + MIB).read_bytes())
        self.assertEqual(self.content, keep.read_bytes())

    def test_a_disk_that_does_not_exist_cannot_be_opened(self) -> None:
        self.assertRaises(SnapshotMissing, self.driver.open, "vm1")


class CrashTest(ThinCase):
    def test_writes_outlive_the_host(self) -> None:
        write(self.create("vm1"), MIB, b"w" * 4096)
        self.crash()
        self.assertEqual({"vm1"}, self.driver.existing().names)
        path = self.driver.open("vm1").path
        assert path is not None
        self.assertEqual(b"w" * 4096, path.read_bytes()[MIB : MIB + 4096])

    def test_a_disk_can_be_deleted_while_nothing_of_it_is_active(self) -> None:
        self.create("vm1")
        self.crash()
        self.driver.delete("vm1")
        self.assertEqual(frozenset(), self.driver.existing().names)

    def test_create_that_was_cut_off_after_any_step_is_finished_by_the_next(self) -> None:
        self.create("other")
        for made_in_pool in (True, False):
            self.create("vm1")
            devmapper.remove(DISK_PREFIX + "vm1")
            if not made_in_pool:
                devmapper.message(POOL, "delete 2")
            self.assertEqual(self.content, self.create("vm1").read_bytes())
            self.driver.delete("vm1")

    def test_delete_that_was_cut_off_is_finished_by_the_next(self) -> None:
        self.create("other")
        self.create("vm1")
        devmapper.remove(DISK_PREFIX + "vm1")
        devmapper.message(POOL, "delete 2")
        self.driver.delete("vm1")
        self.assertEqual({"other"}, self.driver.existing().names)

    def test_another_driver_finds_the_disks(self) -> None:
        self.create("vm1")
        self.assertEqual({"vm1"}, self.new_driver().existing().names)


class SpaceTest(ThinCase):
    def test_no_room_for_a_pool_is_an_error_that_leaves_nothing(self) -> None:
        small = small_file_system(self, "160M")
        driver = DmThinSnapshot(Place(small, small), step=STEP)
        fill(small, but=MIB)
        self.assertRaises(NoSpace, driver.create, "vm1", self.origin, SIZE)
        self.assertEqual(frozenset(), driver.existing().names)
        self.assertEqual([], list((small / "thin").iterdir()))

    def test_a_disk_whose_pool_found_no_room_can_be_deleted(self) -> None:
        small = small_file_system(self, "160M")
        driver = DmThinSnapshot(Place(small, small), step=STEP)
        ballast = fill(small, but=META_BYTES + STEP + MIB)
        driver.create("vm1", self.origin, SIZE)
        driver.close()
        devmapper.remove(DISK_PREFIX + "vm1")
        devmapper.remove(POOL)
        for name in ("data", "meta"):  # as if the room had gone between the look at it and the taking of it
            loopdev.detach(small / "thin" / name)
            (small / "thin" / name).unlink()
        ballast.unlink()
        fill(small, but=META_BYTES + MIB)
        self.assertRaises(NoSpace, driver.open, "vm1")
        driver.delete("vm1")
        self.assertEqual([], list((small / "thin").iterdir()))

    def test_the_pool_grows_with_what_vms_write(self) -> None:
        path = self.create(size=4 * STEP)
        data = os.urandom(3 * STEP)
        write(path, 0, data)
        self.assertEqual(data, path.read_bytes()[: len(data)])
        self.assertGreaterEqual((self.folder / "thin" / "data").stat().st_size, 4 * STEP)

    def test_writes_wait_while_the_file_system_is_full_and_go_on_when_it_is_not(self) -> None:
        small = small_file_system(self, "160M")
        driver = DmThinSnapshot(Place(small, small), step=STEP)
        self.addCleanup(driver.close)
        path = driver.create("vm1", self.origin, 4 * STEP).path
        assert path is not None
        self.addCleanup(driver.delete, "vm1")
        ballast = fill(small, but=MIB)
        writer = subprocess.Popen(["dd", "if=/dev/zero", f"of={path}", "bs=1M", "count=48", "oflag=direct"],
                                  stderr=subprocess.PIPE)  # fmt: skip
        self.addCleanup(writer.communicate)
        self.assertRaises(subprocess.TimeoutExpired, writer.wait, 8)
        ballast.unlink()
        self.assertEqual(0, writer.wait(60))
