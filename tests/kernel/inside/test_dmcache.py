"""The dm-cache driver over a base of known content, whose own counter says what was fetched."""

from __future__ import annotations

import os
from pathlib import Path

from drivers.base import Device, Image, Place
from drivers.cache.dmcache import DmCache
from drivers.kernel import devmapper, loopdev
from tests.kernel.inside import caches
from tests.kernel.inside.baddisk import BadDisk
from tests.kernel.inside.caches import AT_MOST, CacheCase, content, fetched

SMALL = 4 << 20


class DmCacheCase(CacheCase):
    """Caches in files on the guest's disk."""

    cache: DmCache

    def new_cache(self) -> DmCache:
        return DmCache(self.place)


class ContractTest(DmCacheCase, caches.ContractCase):
    """The contract of all cache drivers."""


class DmCacheTest(DmCacheCase, caches.SharedCase):
    """What holds for this driver."""

    def inner(self, image: Image) -> str:
        return f"virtman-cachein-{image.name}-{image.key[:16]}"

    def file(self, kind: str) -> Path:
        (found,) = (self.place.state / "cache").glob(f"*.{kind}")
        return found

    def heartbeats(self, image: Image, read: int = 0) -> None:
        """As many as it takes until nothing of the ``read`` bytes, by default all, waits in memory any more."""
        for _ in range(60):
            if self.cache.stats(image).held_bytes >= (read or image.size):
                return
        self.fail("not all that was read came into the cache")

    def test_reads_of_any_kind_are_fetched_once(self) -> None:
        for size, direct in ((4096, True), (1 << 20, True), (64 << 10, False)):
            image, base = self.new_base(f"base-{size}")
            path = self.opened(image, base)
            before = fetched(base)
            self.assert_reads(image, path, size, direct=direct)
            self.heartbeats(image)
            for _ in range(2):  # each begins with an empty page cache
                self.assert_reads(image, path, size, direct=direct)
            self.assertLessEqual(fetched(base) - before, AT_MOST * image.size)

    def test_what_was_read_is_there_after_closing_and_opening(self) -> None:
        image, base = self.new_base()
        path = self.opened(image, base)
        before = fetched(base)
        self.assert_reads(image, path)
        self.cache.close(image)
        self.assertEqual(image.size, self.cache.stats(image).held_bytes)
        self.assertEqual({image.key}, self.cache.existing())
        self.assert_reads(image, self.opened(image, base))
        # Less than all, since udev probes the loop device each time: half a MiB.
        self.assertLessEqual(fetched(base) - before, AT_MOST * image.size)

    def test_an_opening_that_was_cut_short_is_finished_and_keeps_what_is_held(self) -> None:
        image, base = self.new_base(size=SMALL)
        path = self.opened(image, base)
        self.assert_reads(image, path)
        self.cache.stats(image)
        for missing in ([path.name], [path.name, self.inner(image)]):
            for made in missing:
                devmapper.remove(made)
            self.assertEqual(path, self.new_cache().open(image, base).path)
            self.assert_reads(image, path)
        self.assertGreater(self.cache.stats(image).held_bytes, 0)

    def test_after_a_power_cut_the_cache_starts_empty(self) -> None:
        image, base = self.new_base(size=SMALL)
        self.assert_reads(image, self.opened(image, base))
        self.cache.close(image)
        self.assertEqual([], list((self.place.state / "cache").glob("*.open")))
        # What a power cut may leave: a table that names blocks whose data never came to the disk.
        self.file("data").write_bytes(bytes(self.file("data").stat().st_size))
        self.file("data").with_suffix(".open").write_text("another boot")
        self.assert_reads(image, self.opened(image, base))

    def test_a_damaged_or_lost_file_starts_empty(self) -> None:
        image, base = self.new_base(size=SMALL)
        self.assert_reads(image, self.opened(image, base))
        self.cache.close(image)
        for kind, bytes_left in (("meta", b"damage" * 2000), ("meta", None), ("data", b"short"), ("data", None)):
            file = self.file(kind)
            if bytes_left is None:
                file.unlink()
            elif kind == "meta":
                with file.open("r+b") as opened:
                    opened.write(bytes_left)
            else:
                file.write_bytes(bytes_left)
            self.assert_reads(image, self.opened(image, base))
            self.cache.close(image)

    def test_a_bad_sector_of_the_caches_disk_is_read_from_the_parents(self) -> None:
        disk = BadDisk(self, self.folder)
        self.place = Place(state=disk.folder / "state", run=disk.folder / "run")
        self.cache = self.new_cache()
        image, base = self.new_base(size=SMALL)
        path = self.opened(image, base)
        self.assert_reads(image, path)
        self.heartbeats(image)
        disk.spoil(self.file("data"), SMALL // 2)
        self.assert_reads(image, path)
        self.assertIn("RA", devmapper.status(path.name))
        with self.assertLogs("drivers.cache.dmcache", "WARNING") as said:
            self.cache.stats(image)
            self.cache.stats(image)
        self.assertEqual(1, len(said.output))
        self.assertIn("reads pass it by until the next opening", said.output[0])
        self.cache.close(image)
        self.opened(image, base)
        self.assertIn("AA", devmapper.status(path.name))

    def test_an_image_of_one_sector(self) -> None:
        image, base = self.new_base(size=512)
        self.assert_reads(image, self.opened(image, base))
        self.assertLessEqual(self.cache.stats(image).held_bytes, 512)

    def test_an_image_larger_than_the_memory_is_moved_into_the_cache(self) -> None:
        _, start = self.new_base("start", SMALL)
        size, sectors = 4 << 30, SMALL // 512
        self.assertGreater(size, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        table = [f"0 {sectors} linear {start.path} 0", f"{sectors} {size // 512 - sectors} zero"]
        base = Device(size=size, path=devmapper.create("virtman-testlarge", table, read_only=True))
        self.addCleanup(devmapper.remove, "virtman-testlarge")
        image = Image(name="large", size=size, digest=f"sha256:{'0' * 64}")
        content(self.opened(image, base), 1 << 20, direct=True, end=SMALL)
        self.heartbeats(image, SMALL)

    def test_a_file_that_fails_below_the_cache_is_passed_by_and_the_cache_opens_again(self) -> None:
        for kind in ("meta", "data"):
            image, base = self.new_base(kind, SMALL)
            path = self.opened(image, base)
            self.assert_reads(image, path, 4096)
            between = self.put_map_below(image, base, kind)
            devmapper.reload(between, [f"0 {self.file(kind).stat().st_size // 512} error"])
            for _ in range(5):  # until the driver gives up
                self.assert_reads(image, path)
                self.cache.stats(image)
            self.cache.close(image)
            devmapper.remove(between)
            self.assert_reads(image, self.opened(image, base))
            self.heartbeats(image)
            self.cache.close(image)
            self.cache.remove(image.key)

    def put_map_below(self, image: Image, base: Device, kind: str) -> str:
        """Open a cache anew over a map that stands for one of its files, and can fail."""
        loop = loopdev.device_of(self.file(kind))
        assert loop is not None
        inner, sectors = self.inner(image), self.file(kind).stat().st_size // 512
        between = devmapper.create(f"virtman-testfails-{kind}", [f"0 {sectors} linear {loop} 0"])
        self.addCleanup(devmapper.remove, between.name)
        table = devmapper.table(inner).replace(devmapper.number(loop), devmapper.number(between))
        for made in (f"virtman-cache-{image.name}-{image.key[:16]}", inner):
            devmapper.remove(made)
        devmapper.create(inner, [table])
        self.cache.open(image, base)
        return between.name
