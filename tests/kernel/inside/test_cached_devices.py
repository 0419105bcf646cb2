"""Devices of others that are read through the cache group, each a loop device over a file that a test looks at."""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from drivers.cache.cacheddevices import HEADERS, Devices
from drivers.cachemodels import CachedDevice, DeviceState
from drivers.errors import DeviceRefused, NotReleased
from drivers.host.command import run
from drivers.kernel import bcachedev, devmapper, loopdev, multipath
from tests.contracts import drivers as contracts
from tests.kernel.inside.caches import BcacheCase, Busy, content, drop_memory
from tests.kernel.inside.killing import killed_at, programs_run
from tests.patience import wait_until

MIB = 1 << 20
SIZE = 16 * MIB
BLOCK = 4096
VOLUME = 1 << 30


class DeviceCase(BcacheCase):
    """``file`` is what ``device``, a loop device, is over; what it has to hold is ``wanted``."""

    size = SIZE

    def setUp(self) -> None:
        super().setUp()
        self.elsewhere = Path(tempfile.mkdtemp(dir="/var/tmp"))
        self.addCleanup(shutil.rmtree, self.elsewhere)
        self.file, self.device = self.new_device("device", self.size)
        self.wanted = bytearray(self.file.read_bytes())

    def new_device(self, name: str, size: int = SIZE, *, sector: int = 512) -> tuple[Path, Path]:
        """A device of random bytes, which is no file of the agent's."""
        file = self.elsewhere / name
        file.write_bytes(os.urandom(size))
        loop = run(["losetup", "--find", "--show", "--direct-io=on", f"--sector-size={sector}", str(file)]).stdout
        device = Path(loop.strip())
        self.addCleanup(run, ["losetup", "--detach", str(device)])
        self.addCleanup(run, ["udevadm", "settle"])  # udev may be reading it still: an error in the kernel's log
        return file, device

    def attached(self, device: Path | None = None, name: str = "one") -> Path:
        attached = self.cache.devices.attach_device(name, device or self.device)
        self.addCleanup(self.cache.devices.detach_device, name, force=True)
        return contracts.path_of(attached)

    def found(self, name: str = "one") -> CachedDevice:
        return next(device for device in self.cache.devices.devices() if device.device == name)

    def write(self, path: Path, offset: int, data: bytes) -> None:
        """Write, past the page cache, what is to be found there from then on."""
        write(path, offset, data)
        self.wanted[offset : offset + len(data)] = data

    def write_and_read(self, path: Path) -> None:
        """Write somewhere in the first quarter of the device, and read that."""
        offset = random.randrange(SIZE // 4 // BLOCK) * BLOCK
        self.write(path, offset, os.urandom(BLOCK))
        self.assertEqual(self.wanted[offset : offset + BLOCK], read(path, offset, BLOCK))

    def assert_holds(self, path: Path, size: int = 64 << 10) -> None:
        drop_memory(path)
        self.assertTrue(content(path, size, direct=True) == bytes(self.wanted), "wrong bytes")

    def assert_reads_through(self, path: Path) -> None:
        """What has been read is read from a volume; bcache may not have kept all of it the first time."""
        fetched = []
        for _ in range(3):
            before = reads_of(self.device)
            self.assert_holds(path)
            fetched.append(reads_of(self.device) - before)
        self.assertLess(min(fetched), len(self.wanted) // 20, fetched)

    def disk_map(self, name: str, below: Path, size: int) -> Path:
        """A map, which can be made to fail, that somebody else's disk is."""
        path = devmapper.create(name, [f"0 {size // 512} linear {below} 0"])
        self.addCleanup(devmapper.remove, name)
        return path

    def failing_volume(self) -> Path:
        """The only volume, which a test can have fail: see ``fail``."""
        file = self.folder / "volume-file"
        with file.open("wb") as opened:
            opened.truncate(VOLUME)
        loop = loopdev.attach(file)
        self.addCleanup(loopdev.detach, file)
        volume = self.disk_map("virtman-testvolume", loop, VOLUME)
        self.cache.group.add_volume(volume)
        self.cache.group.remove_volume(self.place.state / "cache/pool")
        return volume


class ContractTest(DeviceCase, contracts.DeviceCacheContract):
    """What every driver has to do that caches devices."""

    def setUp(self) -> None:
        super().setUp()
        _, self.other = self.new_device("other", MIB)
        _, self.used = self.new_device("used", MIB)
        self.disk_map("virtman-testused", self.used, MIB)
        for name in ("one", "two"):
            self.addCleanup(self.cache.devices.detach_device, name, force=True)

    def make(self) -> Devices:
        return self.new_cache().devices

    def resize(self, size: int) -> None:
        os.truncate(self.file, size)
        run(["losetup", "--set-capacity", str(self.device)])

    @contextmanager
    def hold(self, path: Path) -> Iterator[None]:
        with path.open("r+b", buffering=0):
            yield


class DevicesTest(DeviceCase):
    def test_what_is_written_is_on_the_device_at_once_and_read_from_the_cache(self) -> None:
        path = self.attached()
        self.assertEqual(DeviceState.CACHED, self.found().state)
        self.assert_reads_through(path)
        self.write(path, 5 * MIB, os.urandom(MIB))
        self.assertEqual(self.wanted, self.file.read_bytes())
        self.assert_reads_through(path)
        self.assertGreater(self.found().cache_bytes, SIZE // 2)
        # The kernel adds up now and then (Linux: drivers/md/bcache/stats.c, scale_accounting).
        wait_until(lambda: self.found().hits > 0 and self.found().misses > 0)

    def test_nothing_is_left_on_the_device(self) -> None:
        path = self.attached()
        self.write(path, 0, os.urandom(BLOCK))
        self.write(path, SIZE - BLOCK, os.urandom(BLOCK))
        self.cache.devices.detach_device("one")
        self.assertEqual(self.wanted, self.file.read_bytes())
        self.assertEqual([], list(HEADERS.glob("*")))
        os.close(os.open(self.device, os.O_RDWR | os.O_EXCL))

    def test_what_was_read_before_is_nothing_to_the_next_attachment(self) -> None:
        self.assert_reads_through(self.attached())
        self.cache.devices.detach_device("one")
        elsewhere = os.urandom(SIZE)
        write(self.device, 0, elsewhere)
        self.wanted[:] = elsewhere
        for name in ("one", "two"):
            self.assert_holds(self.attached(name=name))
            self.cache.devices.detach_device(name)

    def test_random_reads_and_writes_of_many_at_once(self) -> None:
        path = self.attached()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda part: self.check_part(path, part), range(4)))
        self.assert_holds(path)
        self.assertEqual(self.wanted, self.file.read_bytes())

    def check_part(self, path: Path, part: int, times: int = 100) -> None:
        """Write and read at random within a quarter of the device."""
        choose, quarter = random.Random(part), SIZE // 4
        for _ in range(times):
            length = choose.choice((512, BLOCK, 3 * BLOCK, 96 << 10))
            offset = quarter * part + choose.randrange((quarter - length) // 512) * 512
            if choose.random() < 0.5:
                self.write(path, offset, choose.randbytes(length))
            self.assertEqual(self.wanted[offset : offset + length], read(path, offset, length))

    def test_sizes_that_are_no_multiple_of_anything(self) -> None:
        self.check_shape(8 * MIB + 3 * 512, sector=512)

    def test_sectors_of_4_kib(self) -> None:
        self.check_shape(SIZE, sector=4096)

    def check_shape(self, size: int, sector: int) -> None:
        self.file, self.device = self.new_device("shaped", size, sector=sector)
        self.wanted = bytearray(self.file.read_bytes())
        path = self.attached(self.device)
        self.assertEqual(str(sector), run(["blockdev", "--getss", str(path)]).stdout.strip())
        self.write(path, size - sector, os.urandom(sector))
        self.assert_reads_through(path)
        self.assertEqual(self.wanted, self.file.read_bytes())

    def test_discards_reach_the_device_and_what_was_cached_is_not_read_any_more(self) -> None:
        path = self.attached()
        self.assert_reads_through(path)
        run(["blkdiscard", "--offset", str(4 * MIB), "--length", str(MIB), str(path)])
        self.wanted[4 * MIB : 5 * MIB] = bytes(MIB)
        self.assertEqual(self.wanted, self.file.read_bytes())
        self.assert_holds(path)
        run(["blkdiscard", "--zeroout", "--offset", str(8 * MIB), "--length", str(MIB), str(path)])
        self.wanted[8 * MIB : 9 * MIB] = bytes(MIB)
        self.assert_holds(path)
        self.assertEqual(self.wanted, self.file.read_bytes())

    def test_nobody_probes_what_guests_wrote(self) -> None:
        run(["udevadm", "settle"])  # it has looked at the loop device when that came
        before = reads_of(self.device)
        self.attached()
        run(["udevadm", "settle"])
        self.assertEqual(0, reads_of(self.device) - before)

    def test_it_grows_under_who_writes(self) -> None:
        path = self.attached()
        with Busy(self, partial(self.write_and_read, path)):
            with self.file.open("ab") as file:
                file.write(bytes(SIZE))
            run(["losetup", "--set-capacity", str(self.device)])
            self.assertEqual(2 * SIZE, self.cache.devices.attach_device("one", self.device).size)
        self.wanted += bytes(SIZE)
        self.write(path, 2 * SIZE - BLOCK, os.urandom(BLOCK))
        self.assert_reads_through(path)
        self.assertEqual(self.wanted, self.file.read_bytes())

    def test_a_group_may_use_what_is_handed_out(self) -> None:
        self.place = replace(self.place, group=12345)
        self.cache = self.new_cache()
        found = self.attached().stat()
        self.assertEqual((12345, 0o660), (found.st_gid, found.st_mode & 0o777))


class RefusedTest(DeviceCase):
    def refused(self, device: Path) -> str:
        error = self.assertRaises(DeviceRefused, self.cache.devices.attach_device, "bad", device)
        self.assertNotIn("bad", self.cache.devices.existing_devices())
        return str(error)

    def test_what_somebody_uses(self) -> None:
        run(["mke2fs", "-q", str(self.device)])
        mount = self.folder / "mount"
        mount.mkdir()
        run(["mount", str(self.device), str(mount)])
        self.addCleanup(run, ["umount", str(mount)])
        self.assertIn("it is mounted", self.refused(self.device))
        _, lower = self.new_device("lower", MIB)
        self.disk_map("othertest", lower, MIB)
        self.assertIn("a part of something: dm-", self.refused(lower))
        _, below = self.new_device("below", MIB)
        over = run(["losetup", "--find", "--show", str(below)]).stdout.strip()
        self.addCleanup(run, ["losetup", "--detach", over])
        self.assertIn(f"the loop device {over} is over it", self.refused(below))

    def test_what_is_read_only(self) -> None:
        run(["blockdev", "--setro", str(self.device)])
        self.assertEqual("it is read-only", self.refused(self.device))
        run(["blockdev", "--setrw", str(self.device)])

    def test_what_is_ours(self) -> None:
        path = self.attached()
        self.assertIn("the map virtman-volume-one", self.refused(path))
        self.assertIn("VirtMan's own", self.refused(Path("/dev/bcache0")))
        file, disk = self.new_device("volume", MIB)
        run(["udevadm", "settle"])  # it reads the disk, which is empty for a moment
        with file.open("r+b") as opened:
            opened.truncate(0)
            opened.truncate(VOLUME)
        run(["losetup", "--set-capacity", str(disk)])
        self.cache.group.add_volume(disk)
        self.assertIn(f"the cache volume {disk}", self.refused(disk))
        self.cache.group.remove_volume(disk)
        image, base = self.new_base(size=MIB)
        self.assertIn("the map virtman-cache-base-", self.refused(self.opened(image, base)))
        (header,) = HEADERS.glob("*")
        loop = loopdev.device_of(header)
        assert loop is not None
        self.assertIn("virtman", self.refused(loop).lower())


class VolumesTest(DeviceCase):
    """Volumes come and go while a device is written."""

    def test_volumes_change_under_who_writes(self) -> None:
        path = self.attached()
        default, other = self.place.state / "cache/pool", self.folder / "other"
        with Busy(self, partial(self.write_and_read, path)):
            for added, removed in ((other, default), (default, other)):
                self.cache.group.add_volume(added)
                self.cache.group.remove_volume(removed)
                self.assertEqual(DeviceState.DIRECT, self.found().state)
                self.cache.devices.tend_device("one")
                self.assertEqual(DeviceState.CACHED, self.found().state)
                self.assertEqual([["one"]], [volume.devices for volume in self.cache.group.volumes()])
        self.assert_reads_through(path)
        self.assertEqual(self.wanted, self.file.read_bytes())

    def test_without_a_volume_it_goes_straight_until_there_is_one(self) -> None:
        self.cache.group.remove_volume(self.place.state / "cache/pool")
        path = self.attached()
        self.write(path, MIB, os.urandom(MIB))
        self.assert_holds(path)
        self.cache.devices.tend_device("one")
        self.assertEqual(DeviceState.DIRECT, self.found().state)
        with Busy(self, partial(self.write_and_read, path)):
            self.cache.group.add_volume(self.folder / "volume")
            self.cache.devices.tend_device("one")
        self.assert_reads_through(path)
        self.assertEqual(self.wanted, self.file.read_bytes())
        self.cache.devices.detach_device("one")
        self.cache.group.remove_volume(self.folder / "volume")

    def test_a_volume_runs_until_the_last_device_and_image_have_left(self) -> None:
        image, base = self.new_base(size=MIB)
        self.opened(image, base)
        path = self.attached()
        self.cache.close(image)
        self.assert_reads_through(path)
        self.opened(image, base)
        self.cache.devices.detach_device("one")
        self.assertEqual([[image.name]], [volume.images for volume in self.cache.group.volumes()])

    def test_no_byte_is_stale_and_no_error_seen_when_a_volume_fails_and_comes_back(self) -> None:
        volume = self.failing_volume()
        path = self.attached()
        self.assert_reads_through(path)
        with Busy(self, partial(self.write_and_read, path)):
            devmapper.reload(volume.name, [f"0 {VOLUME // 512} error"])
            wait_until(lambda: self.found().state == DeviceState.DIRECT)
            self.write(path, SIZE // 2, os.urandom(SIZE // 4))
        self.assert_holds(path)
        devmapper.reload(volume.name, [f"0 {VOLUME // 512} linear {self.lower(volume)} 0"])
        self.cache.devices.tend_device("one")
        self.assert_holds(path)
        self.cache.group.tend_volume(volume)  # what failed is empty then
        with Busy(self, partial(self.write_and_read, path)):
            self.cache.devices.tend_device("one")
        self.assertEqual(DeviceState.CACHED, self.found().state)
        self.assert_reads_through(path)
        self.assertEqual(self.wanted, self.file.read_bytes())
        self.cache.devices.detach_device("one")
        self.cache.group.remove_volume(volume)

    def lower(self, volume: Path) -> Path:
        loop = loopdev.device_of(self.folder / "volume-file")
        assert loop is not None
        return loop


class ErrorsTest(DeviceCase):
    """The storage fails, or does not answer."""

    def setUp(self) -> None:
        super().setUp()
        self.line = f"0 {SIZE // 512} linear {self.device} 0"
        self.storage = self.disk_map("storagetest", self.device, SIZE)

    def test_an_error_of_the_device_is_told_and_forgotten(self) -> None:
        path = self.attached(self.storage)
        self.assert_holds(path)
        for _ in range(3):
            devmapper.reload(self.storage.name, [f"0 {SIZE // 512} error"])
            for _ in range(2):
                self.assertRaises(OSError, write, path, 0, os.urandom(BLOCK))
            devmapper.reload(self.storage.name, [self.line])
            wait_until(lambda: self.is_tried_again(path.name))  # errors are told until then
            self.write(path, 0, os.urandom(BLOCK))
            self.assert_holds(path)
            self.cache.devices.tend_device("one")
            self.assert_holds(path)
            self.assertEqual(DeviceState.CACHED, self.found().state)
        self.assertEqual(self.wanted, self.file.read_bytes())

    def is_tried_again(self, top: str) -> bool:
        """Whether a map has a path, and holds what it has none for."""
        table = devmapper.table(top)
        return set(devmapper.numbers_in(table)) > multipath.state(top).failed and "queue_if_no_path" in table

    def test_what_a_device_had_no_space_for_is_not_read(self) -> None:
        """An error that fails no path of the map."""
        thin = self.full_device()
        path = self.attached(thin)
        with contextlib.suppress(OSError):
            for offset in range(0, 2 * MIB, 64 << 10):
                write(path, offset, os.urandom(64 << 10))
        error = self.assertRaises(OSError, write, path, 8 * MIB, b"x" * BLOCK)
        self.assertEqual(errno.ENOSPC, error.errno)
        for _ in range(2):
            self.assertEqual(bytes(BLOCK), read(path, 8 * MIB, BLOCK))
            self.cache.devices.tend_device("one")

    def full_device(self) -> Path:
        """A thin volume that has no space after its first MiB."""
        run(["modprobe", "dm_thin_pool"])
        (_, meta), (_, data) = self.new_device("meta", 4 * MIB), self.new_device("data", MIB)
        write(meta, 0, bytes(BLOCK))
        pool = devmapper.create("testpool", [f"0 {MIB // 512} thin-pool {meta} {data} 128 0 1 error_if_no_space"])
        self.addCleanup(devmapper.remove, "testpool")
        devmapper.message("testpool", "create_thin 0")
        thin = devmapper.create("testthin", [f"0 {SIZE // 512} thin {pool} 0"])
        self.addCleanup(devmapper.remove, "testthin")
        return thin

    def test_what_nobody_takes_is_held_while_no_agent_runs(self) -> None:
        """Another process, which ends, has attached it: nobody looks after errors."""
        pid = os.fork()
        if not pid:
            try:
                self.cache.devices.attach_device("one", self.storage)
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        path = Path(self.found().path)
        self.addCleanup(self.cache.devices.detach_device, "one", force=True)
        devmapper.reload(self.storage.name, [f"0 {SIZE // 512} error"])
        with ThreadPoolExecutor(1) as pool:
            written = pool.submit(write, path, 0, bytes(BLOCK))
            wait_until(lambda: len(multipath.state(path.name).failed) == 2)
            self.assertFalse(written.done())
            devmapper.reload(self.storage.name, [self.line])
            self.cache.devices.tend_device("one")
            written.result()
        self.wanted[:BLOCK] = bytes(BLOCK)
        self.assert_holds(path)

    def test_who_is_cut_off_gets_errors_at_once_though_the_storage_is_silent(self) -> None:
        path = self.attached(self.storage)
        fd = os.open(path, os.O_RDWR | os.O_DIRECT)
        self.addCleanup(os.close, fd)
        run(["dmsetup", "suspend", "--nolockfs", self.storage.name])
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(read, path, 0, BLOCK)
            wait_until(lambda: in_flight(path) > 0)
            self.assertRaises(NotReleased, self.cache.devices.detach_device, "one", force=True)
            self.assertRaises(OSError, write_to, fd, 0, bytes(BLOCK))
            self.assertFalse(waiting.done())
            run(["dmsetup", "resume", self.storage.name])
            waiting.exception()
        self.cache.devices.detach_device("one", force=True)
        self.assertRaises(OSError, write_to, fd, 0, bytes(BLOCK))
        self.assertEqual(frozenset(), self.cache.devices.existing_devices())
        self.assertEqual(self.wanted, self.file.read_bytes())
        os.close(os.open(self.storage, os.O_RDWR | os.O_EXCL))


class HalfMadeTest(DeviceCase):
    """What a killed agent leaves."""

    size = 4 * MIB

    def test_what_is_missing_is_made_again_and_what_is_left_over_removed(self) -> None:
        for lost in (("virtman-volume-one", "virtman-volumesplit-one"), ("virtman-volume-one",)):
            path = self.attached()
            for name in lost:
                devmapper.remove(name)
            self.cache = self.new_cache()
            self.assert_reads_through(self.attached())
            for name in lost:
                devmapper.remove(name)
            self.cache.devices.detach_device("one")
            self.assertFalse(path.exists())
            self.assertEqual(frozenset(), self.cache.devices.existing_devices())

    def test_one_that_was_killed_while_errors_were_passed_on_is_put_right(self) -> None:
        path = self.attached()
        devmapper.message(path.name, "fail_if_no_path")
        self.new_cache().devices.tend_device("one")
        self.assertIn("queue_if_no_path", devmapper.table(path.name))

    def check_killed_at_any_program(self, prepare: Callable[[], object], check: Callable[[], object], act: str) -> None:
        """Have a call of a driver killed before its first program or between two, and see what a new one does."""
        for before in (True, False):
            for number in itertools.count(1):
                prepare()
                devices = self.new_cache().devices
                calls: dict[str, Callable[[], object]] = {
                    "attach": partial(devices.attach_device, "one", self.device),
                    "detach": partial(devices.detach_device, "one", force=True),
                    "tend": partial(devices.tend_device, "one"),
                }
                code = killed_at(number, calls[act], self.folder / "programs", before=before)
                self.assertIn(code, (0, -9))
                check()
                if code == 0:
                    self.assertGreater(programs_run(self.folder / "programs"), 5)
                    break

    def check_gone(self) -> None:
        self.new_cache().devices.detach_device("one", force=True)
        self.assertEqual(frozenset(), self.cache.devices.existing_devices())
        os.close(os.open(self.device, os.O_RDWR | os.O_EXCL))

    def test_an_attach_that_is_killed_is_undone(self) -> None:
        self.check_killed_at_any_program(lambda: None, self.check_gone, "attach")

    def test_a_detach_that_is_killed_is_finished_from_under_who_has_it_open(self) -> None:
        with contextlib.ExitStack() as opened:

            def open_again() -> None:
                opened.close()
                opened.enter_context(self.attached().open("rb"))

            self.check_killed_at_any_program(open_again, self.check_gone, "detach")

    def test_a_return_to_the_cache_that_is_killed_is_finished(self) -> None:
        path = self.attached()

        def leave() -> None:
            bcachedev.detach("virtman-volumeof-one")
            self.write(path, 0, os.urandom(MIB))

        def check() -> None:
            self.write(path, MIB, os.urandom(BLOCK))
            self.new_cache().devices.tend_device("one")
            self.assertEqual(DeviceState.CACHED, self.found().state)
            self.assert_holds(path)

        self.check_killed_at_any_program(leave, check, "tend")


def _direct(length: int, data: bytes = b"") -> mmap.mmap:
    buffer = mmap.mmap(-1, length)
    buffer.write(data)
    return buffer


def write(path: Path, offset: int, data: bytes) -> None:
    """Write past the page cache. Raises OSError."""
    fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    try:
        write_to(fd, offset, data)
    finally:
        os.close(fd)


def write_to(fd: int, offset: int, data: bytes) -> None:
    if os.pwritev(fd, [_direct(len(data), data)], offset) != len(data):
        raise OSError("a short write")


def read(path: Path, offset: int, length: int) -> bytes:
    """Read past the page cache. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        buffer = _direct(length)
        os.preadv(fd, [buffer], offset)
        return buffer[:length]
    finally:
        os.close(fd)


def reads_of(device: Path) -> int:
    """Bytes read from a device until now."""
    return int(devmapper.counters(device).read_text().split()[2]) * 512


def in_flight(path: Path) -> int:
    return int(devmapper.counters(path).read_text().split()[8])
