"""What the tests of cache drivers have in common: a base of known content, whose own counter says what was fetched."""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from testtools import TestCase

from drivers.base import CacheDriver, Device, Image, Place
from drivers.cache.bcache import BcacheCache
from drivers.errors import CommandFailed
from drivers.host.command import run
from drivers.kernel import devmapper, loopdev
from tests.contracts import drivers as contracts
from tests.kernel.inside.filesystems import small_file_system
from tests.kernel.inside.folders import state_folder
from tests.patience import wait_until

log = logging.getLogger(__name__)

SIZE = (8 << 20) + 3 * 512
"""Bytes: not a multiple of what a driver splits reads to."""
ALIGNED = 1 << 20
AT_MOST = 1.05
READERS = 10


class CacheCase(TestCase):
    """A ``cache`` on the guest's disk. All maps, loop devices and bcache sets are gone afterwards."""

    cache: CacheDriver

    def setUp(self) -> None:
        """Remember what is there: the last thing that a test looks at."""
        super().setUp()
        folder = state_folder(self)
        self.addCleanup(lambda before: self.assertEqual(before, found()), found())
        self.folder = folder
        self.contents: dict[str, bytes] = {}
        self.place = Place(state=folder / "state", run=folder / "run")
        self.cache = self.new_cache()

    @abstractmethod
    def new_cache(self) -> CacheDriver:
        """A driver on ``place``, as an agent that starts has it."""

    def new_base(self, name: str = "base", size: int = SIZE) -> tuple[Image, Device]:
        """A new image of random bytes and the map that stands for its parents."""
        file = self.folder / name
        data = os.urandom(size)
        file.write_bytes(data)
        loop = loopdev.attach(file, read_only=True)
        self.addCleanup(loopdev.detach, file)
        test_map = f"virtman-testbase-{name}"
        path = devmapper.create(test_map, [f"0 {size // 512} linear {loop} 0"], read_only=True)
        self.addCleanup(devmapper.remove, test_map)
        # Drivers only compare digests. To make a true one of so many bytes takes an emulated processor long.
        image = Image(name=name, size=size, digest=f"sha256:{secrets.token_hex(32)}")
        self.contents[image.digest] = data
        return image, Device(size=size, path=path)

    def opened(self, image: Image, base: Device) -> Path:
        device = self.cache.open(image, base)
        self.addCleanup(self.cache.close, image)
        self.assertEqual(image.size, device.size)
        return contracts.path_of(device)

    def assert_reads(self, image: Image, path: Path, size: int = 1 << 20, *, direct: bool = True) -> None:
        self.assert_content(image, read(path, size, direct=direct))

    def assert_content(self, image: Image, got: bytes) -> None:
        self.assertTrue(self.contents[image.digest] == got, f"{image.name}: wrong bytes")

    def check_fetched_once(self, image: Image, base: Device, sizes: Sequence[int], *, direct: bool) -> None:
        """Twice read an image that begins to be open, each part of it in requests of another size."""
        path, before = self.opened(image, base), fetched(base)
        part = image.size // len(sizes) // ALIGNED * ALIGNED
        starts = [number * part for number in range(len(sizes))]
        ends = [*starts[1:], image.size]
        for _ in range(2):
            drop_memory(path)
            ranges = zip(sizes, starts, ends, strict=True)
            parts = [content(path, size, direct=direct, start=start, end=end) for size, start, end in ranges]
            self.assert_content(image, b"".join(parts))
        self.assertLessEqual(fetched(base) - before, AT_MOST * image.size)


class BcacheCase(CacheCase):
    """The cache is bcache."""

    cache: BcacheCache

    def new_cache(self) -> BcacheCache:
        return BcacheCache(self.place)


class SharedCase(CacheCase):
    """What holds for each cache in the kernel, besides the contract."""

    def test_ten_readers_at_once_fetch_once(self) -> None:
        image, base = self.new_base(size=4 << 20)
        path = self.opened(image, base)
        before, ready = fetched(base), threading.Barrier(READERS)

        def together(_reader: int) -> bytes:
            ready.wait()
            return content(path, 1 << 20, direct=True)

        with ThreadPoolExecutor(READERS) as pool:
            for got in pool.map(together, range(READERS)):
                self.assert_content(image, got)
        self.assertLessEqual(fetched(base) - before, AT_MOST * image.size)

    def test_files_may_lie_on_a_file_system_with_sectors_of_4_kib(self) -> None:
        small = small_file_system(self, self.folder, "256M", sector=4096)
        self.place = Place(state=small / "state", run=small / "run")
        self.cache = self.new_cache()
        image, base = self.new_base(size=1 << 20)
        path = self.opened(image, base)
        before = fetched(base)
        for size in (512, 512, 64 << 10):
            self.assert_reads(image, path, size)
            self.cache.stats(image)
        self.assertLessEqual(fetched(base) - before, AT_MOST * image.size)
        self.assertEqual("512", run(["blockdev", "--getss", str(path)]).stdout.strip())

    def test_a_removed_image_is_never_read_again(self) -> None:
        image, base = self.new_base(size=4 << 20)
        self.assert_reads(image, self.opened(image, base))
        self.cache.close(image)
        self.cache.remove(image.key)
        # The worst case: another content comes under the same key and name.
        other, other_base = self.new_base("other", 4 << 20)
        path = self.opened(Image(name=image.name, size=other.size, digest=image.digest), other_base)
        self.assert_reads(other, path)
        self.assert_reads(other, path, 4096)

    def test_a_disk_in_use_is_not_closed(self) -> None:
        image, base = self.new_base(size=1 << 20)
        path = self.opened(image, base)
        with path.open("rb"):
            self.assertRaises(CommandFailed, self.cache.close, image)
        self.assert_reads(image, path)

    def test_what_was_made_for_a_base_that_is_missing_is_removed(self) -> None:
        image, _ = self.new_base(size=1 << 20)
        self.assertRaises(CommandFailed, self.cache.open, image, Device(image.size, path=Path("/dev/mapper/none")))


class ContractCase(CacheCase, contracts.CacheContract):
    """What every cache driver has to do."""

    def setUp(self) -> None:
        """An image that is closed afterwards."""
        super().setUp()
        self.image, self.base = self.new_base(size=1 << 20)
        self.addCleanup(self.cache.close, self.image)

    def make(self) -> CacheDriver:
        """A driver as an agent that starts has it."""
        return self.new_cache()

    def use(self, device: Device) -> None:
        """Read all of it; heartbeats have what was read kept."""
        self.assert_reads(self.image, contracts.path_of(device))
        wait_until(lambda: self.cache.stats(self.image).held_bytes == self.image.size)

    def release(self) -> None:
        """Nobody has it open."""


class Busy:
    """Does something again and again in a thread, and fails the test if that raises an error."""

    def __init__(self, case: TestCase, act: Callable[[], None]) -> None:
        self._case, self._act = case, act
        self._end = threading.Event()
        self._errors: list[BaseException] = []
        self._rounds = 0
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            while not self._end.is_set():
                self._act()
                self._rounds += 1
        except BaseException as error:  # noqa: BLE001  (told in the thread of the test)
            self._errors.append(error)

    def __enter__(self) -> Busy:
        self._thread.start()
        self._await_round()
        return self

    def _await_round(self) -> None:
        before = self._rounds
        wait_until(lambda: self._rounds > before or bool(self._errors))

    def __exit__(self, *_: object) -> None:
        self._await_round()  # it still works
        self._end.set()
        self._thread.join()
        self._case.assertEqual([], self._errors)


def found() -> list[list[str]]:
    """Maps, loop devices and bcache sets of this machine."""
    run(["udevadm", "settle"])
    maps = run(["dmsetup", "ls"]).stdout
    loops = run(["losetup", "--list", "--noheadings", "--output", "NAME,BACK-FILE"]).stdout
    disks = sorted(path.name for path in Path("/sys/block").glob("bcache*"))
    return [sorted(maps.splitlines()), sorted(loops.splitlines()), sets(), disks]


def sets() -> list[str]:
    return sorted(path.name for path in Path("/sys/fs/bcache").glob("*-*"))


def read(path: Path, size: int, *, direct: bool) -> bytes:
    """The whole disk in requests of ``size`` bytes, past the page cache or with nothing of it there."""
    drop_memory(path)
    return content(path, size, direct=direct)


def drop_memory(path: Path) -> None:
    """Forget what the page cache has of a disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def content(path: Path, size: int, *, direct: bool, start: int = 0, end: int | None = None) -> bytes:
    """The bytes of a disk from ``start`` to ``end``, by default its end, in requests of ``size`` bytes."""
    parts, offset = [], start
    fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    try:
        with mmap.mmap(-1, size) as buffer:
            while offset != end and (count := os.preadv(fd, [buffer], offset)):
                parts.append(buffer[:count])
                offset += count
    finally:
        os.close(fd)
    return b"".join(parts)


def fetched(base: Device) -> int:
    """Bytes read from the parents until now."""
    return _counters(base)[2] * 512


def requests(base: Device) -> int:
    """Reads that the parents have answered until now."""
    return _counters(base)[0]


def _counters(base: Device) -> list[int]:
    return [int(word) for word in devmapper.counters(contracts.path_of(base)).read_text().split()]
