"""Private disks as thin volumes over a device of known content."""

from __future__ import annotations

import itertools
import mmap
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

from drivers.base import Device, Place, VmDiskDriver
from drivers.errors import BadDisk, CommandFailed, DiskInUse, NoSpace
from drivers.host.command import run
from drivers.kernel import devmapper, loopdev
from drivers.snapshot.disks import DISK_PREFIX, Records
from drivers.snapshot.dmthin import DmThinDisks
from drivers.snapshot.snapshotmaps import SNAPSHOT_PREFIX
from drivers.snapshot.thinpool import BLOCK_SECTORS, META_BYTES, POOL
from drivers.snapshot.thinvolumes import ThinDisk
from tests.contracts import drivers as contracts
from tests.kernel.inside import disks
from tests.kernel.inside.disks import MIB, SIZE, DiskCase, write
from tests.kernel.inside.filesystems import fill, small_file_system
from tests.kernel.inside.killing import killed_at
from tests.kernel.inside.standins import stand_in
from tests.patience import PATIENCE, wait_until

STEP = 32 * MIB
SUPERBLOCK = 4096
NO_SPACE_TIMEOUT = Path("/sys/module/dm_thin_pool/parameters/no_space_timeout")
HELD = 60
"""Seconds for which the kernel holds writes, as it comes. With 12, a driver that got no processor for some seconds was
too late."""
LONGER = HELD + 10
HOLD = int(PATIENCE)
"""Where a pool has to grow meanwhile, on whatever machine."""


class ThinCase(DiskCase):
    driver: DmThinDisks

    def new_driver(self) -> DmThinDisks:
        driver = DmThinDisks(Place(self.folder, self.folder, group=disks.GROUP), step=STEP)
        self.addCleanup(driver.close)
        return driver

    def crash(self) -> None:
        self.driver.close()
        for name in sorted(devmapper.names("virtman-"), key=lambda name: name == POOL):
            devmapper.remove(name)
        for file in ("data", "meta"):
            loopdev.detach(self.folder / "thin" / file)
        self.driver = self.new_driver()

    def left(self) -> list[str]:
        return [path.name for path in (self.folder / "thin").iterdir()]

    @property
    def records(self) -> Records[ThinDisk]:
        """As a driver that starts finds them."""
        return Records(self.folder / "thin", ThinDisk)


class EveryDriverTest(disks.EveryDriver, ThinCase):
    def test_without_a_disk_there_is_no_pool(self) -> None:
        self.driver.delete("vm1")
        self.assertFalse(devmapper.exists(POOL))


class SnapshotTest(contracts.SnapshotContract, ThinCase):
    all_orders = False

    def make(self) -> VmDiskDriver:
        return self.new_driver()

    def write(self, device: Device, text: bytes) -> None:
        write(contracts.path_of(device), 0, text)

    def read(self, device: Device, length: int) -> bytes:
        with contracts.path_of(device).open("rb") as file:
            return file.read(length)

    def discard(self, device: Device, length: int) -> None:
        run(["blkdiscard", "--length", str(length), str(device.path)])

    def test_a_disk_that_somebody_has_open_is_not_reverted(self) -> None:
        driver = self.vm_disk()
        self.wrote(driver, b"then")
        driver.take("vm", "snapshot", None)
        with contracts.path_of(driver.open("vm")).open("r+b", buffering=0) as file:
            file.write(b"late")
            self.assert_others_are_told_of(driver)
            os.fsync(file.fileno())
        self.assert_holds(driver, b"late")
        driver.revert("vm", "snapshot")
        self.assert_holds(driver, b"then")


class SnapshotsCase(ThinCase):
    """A disk ``vm1`` beside another one, so that the pool stays when it is deleted."""

    name = DISK_PREFIX + "vm1"

    def setUp(self) -> None:
        super().setUp()
        self.create("other")
        self.path = self.create("vm1")

    def next_agent(self) -> None:
        self.driver.close()
        self.driver = self.new_driver()
        self.driver.open("other")

    def begins(self, vm: str = "vm1") -> bytes:
        """How a disk begins, once it is opened."""
        with self.opened(vm).open("rb") as file:
            return file.read(4)

    @contextmanager
    def opened_snapshot(self, snapshot: str) -> Iterator[BinaryIO]:
        """A snapshot, without reverting to it."""
        with self.driver.reading("vm1", snapshot) as device, contracts.path_of(device).open("rb") as file:
            yield file

    def content_of(self, snapshot: str) -> bytes:
        with self.opened_snapshot(snapshot) as file:
            return file.read()

    def clone(self, snapshot: str = "snapshot", new: str = "new") -> Path:
        return contracts.path_of(self.driver.clone("vm1", snapshot, new))

    def assert_nothing_leaked(self) -> None:
        """The pool has the volumes that are written down as made, and no others."""
        written = [number for disk in self.records.all().values() for number in disk.numbers]
        self.assertEqual([], [disk for disk in self.records.all().values() if disk.unused])
        self.assertEqual(sorted(written), volumes())


def volumes() -> list[int]:
    """The numbers of the pool's volumes, sorted (thin_ls(8))."""
    meta = Path("/dev/block", devmapper.numbers_in(devmapper.table(POOL))[0])
    devmapper.message(POOL, "reserve_metadata_snap")
    try:
        said = run(["thin_ls", "--metadata-snap", "--no-headers", "--format", "DEV", str(meta)]).stdout
    finally:
        devmapper.message(POOL, "release_metadata_snap")
    return sorted(map(int, said.split()))


WRITER = """
import itertools, mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_DIRECT)
page = mmap.mmap(-1, 4096)
for count in itertools.count(1):
    page[:8] = count.to_bytes(8, "big")
    for place in (0, 8 << 20):
        os.pwrite(fd, page, place)
        os.fsync(fd)
    if count == 1:
        print(flush=True)
"""


class SnapshotsTest(SnapshotsCase):
    def test_a_snapshot_is_of_one_moment_also_while_the_disk_is_written(self) -> None:
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(self.path)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        writer.stdout.readline()
        last = 0
        for number in range(4):
            self.driver.take("vm1", f"p{number}", None)
            with self.opened_snapshot(f"p{number}") as file:
                one, two = (int.from_bytes(os.pread(file.fileno(), 8, place)) for place in (0, 8 * MIB))
            self.assertIn(one - two, (0, 1))
            self.assertGreaterEqual(two, last)
            last = two
        self.assertIsNone(writer.poll())
        writer.kill()
        writer.communicate()
        self.assertGreater(last, 1)

    def test_the_disk_is_suspended_while_its_volume_is_copied_and_no_longer(self) -> None:
        minor = os.minor(self.path.stat().st_rdev)
        stand_in(
            self,
            self.folder,
            "dmsetup",
            f'case "$*" in *create_snap*) cat /sys/block/dm-{minor}/dm/suspended >> {self.folder}/seen;; esac',
        )
        self.driver.take("vm1", "snapshot", None)
        self.assertEqual("1\n", (self.folder / "seen").read_text())
        self.assertFalse(devmapper.is_suspended(self.name))

    def test_a_disk_whose_snapshot_fails_goes_on(self) -> None:
        stand_in(self, self.folder, "dmsetup", 'case "$*" in *create_snap*) exit 1;; esac')
        self.assertRaises(CommandFailed, self.driver.take, "vm1", "snapshot", None)
        self.assertFalse(devmapper.is_suspended(self.name))
        self.assertEqual(frozenset(), self.driver.snapshots("vm1"))

    def test_snapshots_outlive_the_host(self) -> None:
        write(self.path, 0, b"then")
        self.driver.take("vm1", "snapshot", None)
        write(self.path, 0, b"late")
        write(self.clone(), 0, b"mine")
        self.crash()
        self.assertEqual({"snapshot"}, self.driver.snapshots("vm1"))
        self.assertEqual((b"late", b"mine"), (self.begins(), self.begins("new")))
        self.driver.revert("vm1", "snapshot")
        self.crash()
        self.assertEqual(b"then", self.begins())
        self.crash()
        self.driver.drop("vm1", "snapshot", None)
        self.assert_nothing_leaked()

    def test_snapshots_of_a_disk_that_is_larger_than_its_image(self) -> None:
        size = SIZE + MIB + 512
        path = self.create("vm2", size)
        write(path, SIZE - 512, b"w" * 1024)
        then = self.content[:-512] + b"w" * 1024 + bytes(MIB)
        self.driver.take("vm2", "snapshot", None)
        write(path, SIZE - 4096, b"x" * MIB)
        self.driver.resize("vm2", size + MIB, None)
        write(path, size + MIB - 512, b"end" * 170)
        with self.driver.reading("vm2", "snapshot") as device:
            self.assertEqual((size, then), (device.size, contracts.path_of(device).read_bytes()))
        self.assertEqual(then, self.open("new", self.driver.clone("vm2", "snapshot", "new")))
        self.assertEqual(then, self.open("vm2", self.driver.revert("vm2", "snapshot")))
        self.assertEqual(then + bytes(MIB), self.open("vm2", self.driver.resize("vm2", size + MIB, None)))

    def open(self, vm: str, device: Device) -> bytes:
        """What a disk holds that was just changed."""
        self.assertEqual(device, self.driver.open(vm))
        content = contracts.path_of(device).read_bytes()
        self.assertEqual(device.size, len(content))
        return content


class ReadingTest(SnapshotsCase):
    """What snapshots keep is read, and agents are killed meanwhile."""

    def setUp(self) -> None:
        super().setUp()
        write(self.path, 0, b"then")
        self.driver.take("vm1", "snapshot", None)
        write(self.path, 0, b"late")
        self.then = b"then" + self.content[4:]

    def left_map(self) -> Path:
        """The map of a reader whose agent is killed before it ends."""
        readers: list[AbstractContextManager[Device]] = []

        def read() -> None:
            readers.append(self.driver.reading("vm1", "snapshot"))
            readers[0].__enter__()

        killed_at(0, read, self.folder / "killers", before=True)
        [name] = devmapper.names(SNAPSHOT_PREFIX)
        return devmapper.map_path(name)

    def assert_no_map(self) -> None:
        self.assertEqual(frozenset(), devmapper.names(SNAPSHOT_PREFIX))

    def test_it_is_read_only_and_the_disk_goes_on_meanwhile(self) -> None:
        with self.driver.reading("vm1", "snapshot") as device:
            path = contracts.path_of(device)
            self.assertEqual("1", run(["blockdev", "--getro", str(path)]).stdout.strip())
            write(self.path, SIZE - 512, b"more" * 128)
            self.assertEqual(self.then, path.read_bytes())
            self.assertEqual(self.then, self.clone().read_bytes())
            self.driver.revert("vm1", "snapshot")
            self.assertEqual(self.then, path.read_bytes())
        self.assert_no_map()
        self.assert_nothing_leaked()

    def test_two_readers_leave_in_any_order_and_what_they_read_is_not_dropped(self) -> None:
        one, two = (self.driver.reading("vm1", "snapshot") for _ in range(2))
        one.__enter__()
        device = two.__enter__()
        one.__exit__(None, None, None)
        self.assertEqual(self.then, contracts.path_of(device).read_bytes())
        self.assertRaises(DiskInUse, self.driver.drop, "vm1", "snapshot", None)
        self.assertRaises(DiskInUse, self.driver.delete, "vm1")
        self.assertEqual(({"snapshot"}, b"late"), (self.driver.snapshots("vm1"), self.begins()))
        two.__exit__(None, None, None)
        self.assert_no_map()
        self.driver.drop("vm1", "snapshot", None)
        self.assert_nothing_leaked()

    def test_a_map_that_a_killed_agent_left_goes_with_the_next_agent_the_snapshot_or_the_disk(self) -> None:
        for act in (
            self.next_agent,
            lambda: self.driver.drop("vm1", "snapshot", None),
            lambda: self.driver.delete("vm1"),
        ):
            self.create("vm1")
            self.driver.take("vm1", "snapshot", None)
            self.left_map()
            act()
            self.assert_no_map()
            self.assert_nothing_leaked()

    def test_what_a_program_of_a_killed_agent_reads_is_not_dropped(self) -> None:
        with self.left_map().open("rb") as file:
            self.assertRaises(DiskInUse, self.driver.drop, "vm1", "snapshot", None)
            self.assertEqual({"snapshot"}, self.driver.snapshots("vm1"))
            self.assertEqual(self.then, file.read())
        self.driver.drop("vm1", "snapshot", None)
        self.assert_no_map()
        self.assert_nothing_leaked()

    def test_metadata_that_a_killed_agent_had_the_kernel_keep_are_let_go(self) -> None:
        devmapper.message(POOL, "reserve_metadata_snap")
        self.assertEqual([], self.driver.changes("other", None, None))
        self.assertEqual("-", devmapper.status(POOL).split()[6])
        devmapper.message(POOL, "reserve_metadata_snap")
        self.next_agent()
        self.assertEqual("-", devmapper.status(POOL).split()[6])

    def test_snapshots_come_and_go_while_metadata_are_looked_through(self) -> None:
        ask = partial(self.driver.changes, "vm1", "snapshot", None)
        before = ask()
        begun, go_on = self.folder / "begun", self.folder / "go-on"
        os.mkfifo(go_on)
        fifo = os.open(go_on, os.O_RDWR)  # who opens the other end does not wait
        self.addCleanup(os.close, fifo)
        stand_in(self, self.folder, "thin_dump", f"touch {begun}; read answer < {go_on}")

        def go() -> None:
            self.driver.take("other", "new", None)
            self.driver.drop("vm1", "snapshot", None)
            write(self.path, MIB, b"more" * 128)

        with ThreadPoolExecutor(3) as pool:
            first = pool.submit(ask)
            try:
                wait_until(lambda: first.done() or begun.exists())
                second = pool.submit(self.driver.changes, "other", None, None)
                pool.submit(go).result(PATIENCE)
            finally:
                os.write(fifo, b"\n\n")
        self.assertEqual((before, []), (first.result(), second.result()))
        self.assertEqual("-", devmapper.status(POOL).split()[6])
        self.assert_nothing_leaked()

    def test_a_snapshot_whose_volume_is_gone_is_told_of(self) -> None:
        devmapper.message(POOL, f"delete {self.records.read('vm1').snapshots['snapshot'].number}")
        for call in (self.driver.reading("vm1", "snapshot").__enter__, self.clone):
            self.assertIn("is gone from the disks' pool", str(self.assertRaises(BadDisk, call)))
        self.assert_no_map()


class GrowTest(SnapshotsCase):
    def test_who_has_the_disk_open_reads_on_and_sees_it_grow(self) -> None:
        with self.path.open("r+b", buffering=0) as file, ThreadPoolExecutor(1) as pool:
            done = threading.Event()
            reading = pool.submit(self.read_until, done)
            try:
                for size in (SIZE + 512, 2 * SIZE):
                    self.driver.resize("vm1", size, None)
                    self.assertEqual(size, file.seek(0, os.SEEK_END))
            finally:
                done.set()
            self.assertGreater(reading.result(PATIENCE), 0)
            self.assertEqual(512, os.pwrite(file.fileno(), b"w" * 512, 2 * SIZE - 512))
        self.assertEqual(self.content + bytes(SIZE - 512) + b"w" * 512, self.path.read_bytes())

    def read_until(self, done: threading.Event) -> int:
        """How often the whole disk was read past the page cache, by 1 MiB."""
        passes, buffer = 0, mmap.mmap(-1, MIB)
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECT)
        try:
            while not done.is_set() or not passes:
                for place in range(0, SIZE, MIB):
                    os.preadv(fd, [buffer], place)
                    if buffer[:] != self.content[place : place + MIB]:
                        raise AssertionError(f"wrong bytes at {place}")
                passes += 1
        finally:
            os.close(fd)
        return passes

    def test_a_map_that_did_not_grow_with_its_record_does_when_it_is_opened(self) -> None:
        self.records.write("vm1", replace(self.records.read("vm1"), size=SIZE + MIB))
        self.assertEqual(SIZE + MIB, self.driver.open("vm1").size)
        self.assertEqual(SIZE + MIB, len(self.path.read_bytes()))


class KilledTest(SnapshotsCase):
    """The agent dies at each step of a call, before and after each program that it runs."""

    def each_step(
        self, call: Callable[[], object], programs: int, prepare: Callable[[], object] = lambda: None
    ) -> Iterator[tuple[int, bool]]:
        """After each death; the call, which is made on what is prepared, runs at least so many programs."""
        for before in (True, False):
            for number in itertools.count(1):
                prepare()
                code = killed_at(number, call, self.folder / "killers", before=before)
                if code == 0:
                    self.assertGreater(number, programs)
                    break
                self.assertEqual(-signal.SIGKILL, code)
                yield number, before

    def test_a_snapshot_is_there_or_not_and_the_disk_goes_on(self) -> None:
        write(self.path, 0, b"then")

        def prepare() -> None:
            self.driver.drop("vm1", "snapshot", None)

        for number, before in self.each_step(lambda: self.driver.take("vm1", "snapshot", None), 3, prepare):
            if before:
                self.driver.open("vm1")
                self.assertFalse(devmapper.is_suspended(self.name), number)  # or the next line would wait for ever
                self.assertEqual(b"then", self.begins())
            self.driver.take("vm1", "snapshot", None)
            self.assertFalse(devmapper.is_suspended(self.name), number)
            self.assertEqual(b"then" + self.content[4:], self.content_of("snapshot"))
            self.assert_nothing_leaked()

    def test_a_disk_that_is_reverted_holds_the_old_or_the_new(self) -> None:
        write(self.path, 0, b"then")
        self.driver.take("vm1", "snapshot", None)
        self.driver.resize("vm1", SIZE + MIB, None)
        write(self.path, 0, b"late")
        self.driver.take("vm1", "late", None)

        def prepare() -> None:
            self.driver.revert("vm1", "late")

        for number, before in self.each_step(lambda: self.driver.revert("vm1", "snapshot"), 5, prepare):
            found = (self.driver.open("vm1").size, self.begins())
            self.assertIn(found, ((SIZE + MIB, b"late"), (SIZE, b"then")), f"{number} {before}")
            self.assertEqual({"snapshot", "late"}, self.driver.snapshots("vm1"))
            self.driver.revert("vm1", "snapshot")
            self.assertEqual((SIZE, b"then"), (self.path_size(), self.begins()))
            self.assert_nothing_leaked()

    def path_size(self) -> int:
        with self.path.open("rb") as file:
            return file.seek(0, os.SEEK_END)

    def test_a_disk_is_deleted_with_all_volumes(self) -> None:
        def prepare() -> None:
            self.create("vm1")
            self.driver.take("vm1", "snapshot", None)
            disk = self.records.read("vm1")
            half = max(disk.numbers) + 1
            devmapper.message(POOL, f"create_snap {half} {disk.number}")
            self.records.write("vm1", replace(disk, unused=(half,)))

        for _ in self.each_step(lambda: self.driver.delete("vm1"), 4, prepare):
            self.driver.delete("vm1")
            self.assertEqual({"other"}, self.driver.existing())
            self.assert_nothing_leaked()


class CrashTest(ThinCase):
    def test_a_volume_that_is_gone_does_not_come_back_empty(self) -> None:
        self.create("vm1")
        devmapper.remove(DISK_PREFIX + "vm1")
        devmapper.message(POOL, f"delete {self.records.read('vm1').number}")
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

    def test_a_pool_that_takes_no_writes_is_told_of(self) -> None:
        self.create()
        table = devmapper.table(POOL)
        devmapper.reload(POOL, [table.replace(" 1 no_discard_passdown", " 2 no_discard_passdown read_only")])
        self.assertIn("takes no writes", self.driver.trouble())
        devmapper.reload(POOL, [table])
        self.assertEqual("", self.driver.trouble())


class MetadataTest(ThinCase):
    def test_a_pool_that_the_kernel_has_marked_for_a_check_can_be_written_after_one(self) -> None:
        write(self.create(), 0, b"before")
        self.crash()
        mark_for_check(self.folder / "thin" / "meta")
        path = self.opened()
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
        driver = DmThinDisks(Place(small, small), step=STEP)
        fill(small, but=MIB)
        self.assertRaises(NoSpace, driver.create, "vm1", self.origin, SIZE)
        self.assertEqual(frozenset(), driver.existing())
        self.assertEqual([], list((small / "thin").iterdir()))

    def test_a_disk_whose_pool_found_no_room_can_be_deleted(self) -> None:
        small = small_file_system(self, self.folder, "160M")
        driver = DmThinDisks(Place(small, small), step=STEP)
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
        self.hold_writes(HOLD)
        path = self.create(size=4 * STEP)
        data = os.urandom(3 * STEP)
        write(path, 0, data)
        self.assertEqual(data, path.read_bytes()[: len(data)])
        wait_until(lambda: pool_size() >= 4 * STEP)

    def test_the_metadata_grow_with_the_pool(self) -> None:
        self.hold_writes(HOLD)
        self.driver = DmThinDisks(Place(self.folder, self.folder), step=STEP, covered=STEP)
        self.addCleanup(self.driver.close)
        write(self.create(size=2 * STEP), 0, os.urandom(2 * STEP))
        wait_until(lambda: pool_size() > 2 * STEP)  # the files grow before the pool does
        steps = (self.folder / "thin" / "data").stat().st_size // STEP
        self.assertGreater(steps, 2)
        self.assertEqual(steps * META_BYTES, (self.folder / "thin" / "meta").stat().st_size)
        blocks = int(devmapper.status(POOL).split()[4].split("/")[1])
        self.assertEqual(steps * META_BYTES // 4096, blocks)

    def hold_writes(self, timeout: int) -> None:
        """Have the kernel hold writes to a pool without room for so many seconds."""
        self.addCleanup(NO_SPACE_TIMEOUT.write_text, NO_SPACE_TIMEOUT.read_text())
        NO_SPACE_TIMEOUT.write_text(str(timeout))

    def full(self, timeout: int) -> tuple[DmThinDisks, Path, Path]:
        """A VM's disk whose pool has no room to grow, while the kernel holds writes for ``timeout`` seconds.

        The driver, the disk, and the file that takes the room.
        """
        small = small_file_system(self, self.folder, "160M")
        driver = DmThinDisks(Place(small, small), step=STEP)
        self.addCleanup(driver.close)
        path = contracts.path_of(driver.create("vm1", self.origin, 4 * STEP))
        self.addCleanup(driver.delete, "vm1")
        self.hold_writes(timeout)
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

    def test_what_a_vm_discards_is_the_pools_again_and_not_the_file_systems(self) -> None:
        _driver, path, _ = self.full(timeout=HELD)
        write(path, SIZE, os.urandom(4 * MIB))
        used = used_blocks()
        run(["blkdiscard", "--offset", str(SIZE), "--length", str(4 * MIB), str(path)])
        self.assertGreaterEqual(taken(self.folder / "small/thin/data"), STEP)
        self.assertEqual(used - 4 * MIB // (BLOCK_SECTORS * devmapper.SECTOR), used_blocks())
        fill(self.folder / "small", but=0)
        content = os.urandom(4 * MIB)
        write(path, SIZE, content)
        with path.open("rb") as file:
            file.seek(SIZE)
            self.assertEqual(content, file.read(4 * MIB))


def taken(file: Path) -> int:
    """Bytes of disk space that a file has."""
    return file.stat().st_blocks * 512


def used_blocks() -> int:
    """Blocks of the pool's data that are some disk's."""
    return int(devmapper.status(POOL).split()[5].split("/")[0])
