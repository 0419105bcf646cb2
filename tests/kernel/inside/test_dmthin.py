"""Private disks as thin volumes over a device of known content."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

from drivers.base import Place
from drivers.errors import BadDisk, NoSpace, SnapshotMissing
from drivers.host.space import allocate
from drivers.host.watch import deaths
from drivers.kernel import devmapper, loopdev
from drivers.snapshot.disks import DISK_PREFIX, Records
from drivers.snapshot.dmthin import BLOCK_SECTORS, META_BYTES, POOL, DmThinSnapshot
from drivers.snapshot.thinvolumes import ThinDisk
from tests.kernel.inside import disks
from tests.kernel.inside.disks import MIB, SIZE, DiskCase, write
from tests.kernel.inside.filesystems import fill, small_file_system
from tests.kernel.inside.openfiles import none_left
from tests.kernel.inside.waits import wait_until
from tests.patience import PATIENCE

STEP = 32 * MIB
SUPERBLOCK = 4096
NO_SPACE_TIMEOUT = Path("/sys/module/dm_thin_pool/parameters/no_space_timeout")
HELD = 60
"""Seconds for which the kernel holds writes, as it comes. With 12, a driver that got no processor for some seconds was
too late."""
LONGER = HELD + 10


class ThinCase(DiskCase):
    driver: DmThinSnapshot

    def new_driver(self) -> DmThinSnapshot:
        driver = DmThinSnapshot(Place(self.folder, self.folder), step=STEP)
        self.addCleanup(driver.close)
        return driver

    def crash(self) -> None:
        self.driver.close()
        for name in sorted(devmapper.names("virtman-"), reverse=True):
            devmapper.remove(name)
        for file in ("data", "meta"):
            loopdev.detach(self.folder / "thin" / file)
        self.driver = self.new_driver()

    def left(self) -> list[str]:
        return [path.name for path in (self.folder / "thin").iterdir()]


class EveryDriverTest(disks.EveryDriver, ThinCase):
    def test_without_a_disk_there_is_no_pool(self) -> None:
        self.driver.delete("vm1")
        self.assertFalse(devmapper.exists(POOL))


class CrashTest(ThinCase):
    def number(self, vm: str = "vm1") -> int:
        return self.records().read(vm).number

    def records(self) -> Records[ThinDisk]:
        return Records(self.folder / "thin", ThinDisk)

    def test_create_that_was_cut_off_before_the_volume_is_written_down_is_done_by_the_next(self) -> None:
        self.create("other")
        for made_in_pool in (True, False):
            self.create("vm1")
            devmapper.remove(DISK_PREFIX + "vm1")
            if not made_in_pool:
                devmapper.message(POOL, f"delete {self.number()}")
            self.records().write("vm1", replace(self.records().read("vm1"), made=False))
            self.assertRaises(SnapshotMissing, self.driver.open, "vm1")
            self.assertEqual(self.content, self.create("vm1").read_bytes())
            self.driver.delete("vm1")

    def test_create_that_was_cut_off_before_the_map_is_finished_by_the_next(self) -> None:
        write(self.create("vm1"), 0, b"w" * 512)
        devmapper.remove(DISK_PREFIX + "vm1")
        self.assertEqual(b"w" * 512, self.create("vm1").read_bytes()[:512])

    def test_delete_that_was_cut_off_is_finished_by_the_next(self) -> None:
        self.create("other")
        self.create("vm1")
        devmapper.remove(DISK_PREFIX + "vm1")
        devmapper.message(POOL, f"delete {self.number()}")
        self.driver.delete("vm1")
        self.assertEqual({"other"}, self.driver.existing().names)

    def test_a_volume_that_is_gone_does_not_come_back_empty(self) -> None:
        self.create("vm1")
        devmapper.remove(DISK_PREFIX + "vm1")
        devmapper.message(POOL, f"delete {self.number()}")
        for call in (self.driver.open, self.create):
            self.assertIn("is gone from the disks' pool", str(self.assertRaises(BadDisk, call, "vm1")))

    def test_a_pool_that_is_gone_does_not_come_back_empty(self) -> None:
        self.create("vm1")
        self.crash()
        (self.folder / "thin" / "data").rename(self.folder / "away")
        self.assertRaises(BadDisk, self.driver.open, "vm1")
        self.assertFalse((self.folder / "thin" / "data").exists())
        (self.folder / "away").rename(self.folder / "thin" / "data")
        self.driver.open("vm1")

    def test_the_pool_stays_with_data_of_a_disk_whose_record_was_lost(self) -> None:
        write(self.create("vm1"), 0, b"w" * 512)
        record = self.records().path("vm1").read_bytes()
        self.records().path("vm1").unlink()
        self.create("vm2")
        self.driver.delete("vm2")
        self.crash()
        self.records().path("vm1").write_bytes(record)
        self.assertEqual(b"w" * 512, self.create("vm1").read_bytes()[:512])


class OtherFilesTest(ThinCase):
    def test_a_pool_over_files_that_the_folder_has_no_more_is_refused_and_told_of(self) -> None:
        self.create()
        kept = (self.folder / "thin").rename(self.folder / "kept")
        shutil.copytree(kept, self.folder / "thin")
        for call in (lambda: self.new_driver().open("vm1"), lambda: self.new_driver().delete("vm1")):
            self.assertIn("other files", str(self.assertRaises(BadDisk, call)))
        self.assertIn("other files", self.driver.trouble())
        shutil.rmtree(self.folder / "thin")
        kept.rename(self.folder / "thin")
        self.assertEqual((self.content, ""), (self.create().read_bytes(), self.driver.trouble()))

    def test_a_file_that_grew_without_its_pool_does_not_grow_again(self) -> None:
        self.create()
        data = self.folder / "thin" / "data"
        allocate(data, 2 * STEP)
        write(self.create("vm2", 2 * SIZE), 0, os.urandom(SIZE + MIB))
        wait_until(lambda: pool_size() >= 2 * STEP)
        self.assertEqual((2 * STEP, 2 * STEP), (pool_size(), data.stat().st_size))

    def test_a_pool_that_takes_no_writes_is_told_of(self) -> None:
        self.create()
        table = devmapper.table(POOL)
        devmapper.reload(POOL, [f"{table.removesuffix(' 0')} 1 read_only"])
        self.assertIn("takes no writes", self.driver.trouble())
        devmapper.reload(POOL, [table])
        self.assertEqual("", self.driver.trouble())


class MetadataTest(ThinCase):
    def test_a_pool_that_the_kernel_has_marked_for_a_check_can_be_written_after_one(self) -> None:
        write(self.create(), 0, b"before")
        self.crash()
        mark_for_check(self.folder / "thin" / "meta")
        path = self.driver.open("vm1").path
        assert path is not None
        write(path, 512, b"after")
        self.assertEqual((b"before", b"after"), (path.read_bytes()[:6], path.read_bytes()[512:517]))

    def test_damaged_metadata_are_told_of_and_not_touched(self) -> None:
        self.create()
        self.crash()
        meta = self.folder / "thin" / "meta"
        sound = meta.read_bytes()
        damaged = sound[:SUPERBLOCK] + b"damaged!" * (len(sound) // 8 - SUPERBLOCK // 8)
        meta.write_bytes(damaged)
        self.assertIn("thin_repair", str(self.assertRaises(BadDisk, self.driver.open, "vm1")))
        self.assertTrue(meta.read_bytes() == damaged)
        meta.write_bytes(sound)
        self.assertEqual(self.content, self.create().read_bytes())


def pool_size() -> int:
    """Bytes that the pool has for data (Linux: admin-guide/device-mapper/thin-provisioning, status)."""
    return int(devmapper.status(POOL).split()[5].split("/")[1]) * BLOCK_SECTORS * devmapper.SECTOR


def mark_for_check(meta: Path) -> None:
    """Set the flag that the kernel sets after an error (Linux: drivers/md/dm-thin-metadata.c, thin_disk_superblock)."""
    with meta.open("r+b") as file:
        block = bytearray(file.read(SUPERBLOCK))
        block[4] |= 1
        block[:4] = (crc32c(bytes(block[4:])) ^ 160774).to_bytes(4, "little")
        file.seek(0)
        file.write(block)


def crc32c(data: bytes) -> int:
    """As the kernel has it: without a last inversion."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc


class SpaceTest(ThinCase):
    def test_no_room_for_a_pool_is_an_error_that_leaves_nothing(self) -> None:
        small = small_file_system(self, self.folder, "160M")
        driver = DmThinSnapshot(Place(small, small), step=STEP)
        fill(small, but=MIB)
        self.assertRaises(NoSpace, driver.create, "vm1", self.origin, SIZE)
        self.assertEqual(frozenset(), driver.existing().names)
        self.assertEqual([], list((small / "thin").iterdir()))

    def test_a_disk_whose_pool_found_no_room_can_be_deleted(self) -> None:
        small = small_file_system(self, self.folder, "160M")
        driver = DmThinSnapshot(Place(small, small), step=STEP)
        ballast = fill(small, but=META_BYTES + STEP + MIB)
        driver.create("vm1", self.origin, SIZE)
        records = Records(small / "thin", ThinDisk)
        records.write("vm1", replace(records.read("vm1"), made=False))
        driver.close()
        devmapper.remove(DISK_PREFIX + "vm1")
        devmapper.remove(POOL)
        for name in ("data", "meta"):  # as if the room had gone between the look at it and the taking of it
            loopdev.detach(small / "thin" / name)
            (small / "thin" / name).unlink()
        ballast.unlink()
        fill(small, but=META_BYTES + MIB)
        self.assertRaises(NoSpace, driver.create, "vm1", self.origin, SIZE)
        driver.delete("vm1")
        self.assertEqual([], list((small / "thin").iterdir()))

    def test_the_pool_grows_with_what_vms_write(self) -> None:
        path = self.create(size=4 * STEP)
        data = os.urandom(3 * STEP)
        write(path, 0, data)
        self.assertEqual(data, path.read_bytes()[: len(data)])
        self.assertGreaterEqual((self.folder / "thin" / "data").stat().st_size, 4 * STEP)

    def test_the_metadata_grow_with_the_pool(self) -> None:
        self.driver = DmThinSnapshot(Place(self.folder, self.folder), step=STEP, covered=STEP)
        self.addCleanup(self.driver.close)
        write(self.create(size=2 * STEP), 0, os.urandom(2 * STEP))
        steps = (self.folder / "thin" / "data").stat().st_size // STEP
        self.assertGreater(steps, 2)
        self.assertEqual(steps * META_BYTES, (self.folder / "thin" / "meta").stat().st_size)
        blocks = int(devmapper.status(POOL).split()[4].split("/")[1])
        self.assertEqual(steps * META_BYTES // 4096, blocks)

    def test_the_pool_grows_on_after_a_moment_without_open_files(self) -> None:
        fd = os.open(self.create(size=4 * STEP), os.O_RDWR)
        self.addCleanup(os.close, fd)
        with none_left():
            os.pwrite(fd, os.urandom(STEP * 3 // 4), 0)
            os.fsync(fd)  # below the mark where the pool has an event
            wait_until(lambda: any(death.thread == "pool-watch" for death in deaths()))
        os.pwrite(fd, os.urandom(3 * STEP), STEP)
        os.fsync(fd)
        self.assertGreaterEqual((self.folder / "thin" / "data").stat().st_size, 4 * STEP)

    def full(self, timeout: int) -> tuple[DmThinSnapshot, Path, Path]:
        """A VM's disk whose pool has no room to grow, while the kernel holds writes for ``timeout`` seconds.

        The driver, the disk, and the file that takes the room.
        """
        small = small_file_system(self, self.folder, "160M")
        driver = DmThinSnapshot(Place(small, small), step=STEP)
        self.addCleanup(driver.close)
        path = driver.create("vm1", self.origin, 4 * STEP).path
        assert path is not None
        self.addCleanup(driver.delete, "vm1")
        self.addCleanup(NO_SPACE_TIMEOUT.write_text, NO_SPACE_TIMEOUT.read_text())
        NO_SPACE_TIMEOUT.write_text(str(timeout))
        return driver, path, fill(small, but=MIB)

    def writer(self, path: Path) -> subprocess.Popen[bytes]:
        """Writes more than the pool has room for."""
        argv = ["dd", "if=/dev/zero", f"of={path}", "bs=1M", "count=48", "oflag=direct"]
        writer = subprocess.Popen(argv, stderr=subprocess.PIPE)
        self.addCleanup(writer.communicate)
        return writer

    def test_writes_wait_while_the_file_system_is_full_and_go_on_when_it_is_not(self) -> None:
        driver, path, ballast = self.full(timeout=HELD)
        writer = self.writer(path)
        self.assertRaises(subprocess.TimeoutExpired, writer.wait, LONGER)
        self.assertIn("small/thin has 0 MiB free", driver.trouble())
        self.assertIn(f"fail after {HELD} s", driver.trouble())
        ballast.unlink()
        self.assertEqual(0, writer.wait(PATIENCE))

    def test_a_pool_that_has_begun_to_fail_writes_holds_them_again_when_an_agent_is_back(self) -> None:
        driver, path, ballast = self.full(timeout=HELD)
        driver.close()
        self.assertNotEqual(0, self.writer(path).wait(PATIENCE))
        driver.open("vm1")
        wait_until(lambda: "queue_if_no_space" in devmapper.status(POOL))
        writer = self.writer(path)
        self.assertRaises(subprocess.TimeoutExpired, writer.wait, LONGER)
        ballast.unlink()
        self.assertEqual(0, writer.wait(PATIENCE))

    def test_the_parameter_of_all_pools_is_left_alone(self) -> None:
        before = NO_SPACE_TIMEOUT.read_text()
        self.create()
        self.assertEqual(before, NO_SPACE_TIMEOUT.read_text())
