"""The bcache driver over a base of known content, whose own counter says what was fetched."""

from __future__ import annotations

import mmap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from platform import freedesktop_os_release

from drivers.cache import onefetch
from drivers.cache.backing import SUPERBLOCK_AT
from drivers.cache.bcache import SPLIT, BcacheCache
from drivers.cache.cachefiles import file_bytes, file_of
from drivers.cache.cachevolumes import SHIFT
from drivers.host.command import run
from drivers.kernel import devmapper
from tests.kernel.inside import caches, loops
from tests.kernel.inside.caches import ALIGNED, AT_MOST, BcacheCase, content, fetched, requests

SIZES = (4096, 128 << 10, 1 << 20)


class ContractTest(BcacheCase, caches.ContractCase):
    """The contract of all cache drivers."""


class BcacheTest(BcacheCase, caches.SharedCase):
    """One volume."""

    def test_reads_of_any_size_are_fetched_once(self) -> None:
        for name, direct in (("direct", True), ("buffered", False)):
            self.check_fetched_once(*self.new_base(name), SIZES, direct=direct)

    def test_a_miss_is_one_request_where_loop_devices_hand_on_whole_ones_and_one_for_each_page_elsewhere(self) -> None:
        image, base = self.new_base()
        path, before = self.opened(image, base), requests(base)
        content(path, SPLIT, direct=True, start=ALIGNED, end=ALIGNED + SPLIT)
        of_pages, whole = (SPLIT // mmap.PAGESIZE, mmap.PAGESIZE), (1, SPLIT)
        release = freedesktop_os_release()["VERSION_ID"]
        self.assertEqual({"12": of_pages, "13": whole}[release], (requests(base) - before, onefetch.piece()))

    def test_what_was_read_is_there_after_closing_and_opening(self) -> None:
        image, base = self.new_base(size=8 << 20)
        path = self.opened(image, base)
        for _ in range(2):  # bcache keeps what a read fetched after the end of the read, and not while it closes
            self.assert_reads(image, path)
        stats = self.cache.stats(image)
        held, files = stats.held_bytes, file_bytes(self.place.state / "cache/pool")
        self.assertGreater(stats.file_bytes, 0)
        self.assertLessEqual(stats.file_bytes, files)
        self.cache.close(image)
        self.assertEqual(held, self.cache.stats(image).held_bytes)
        self.assertEqual({image.key}, self.cache.existing())
        before = fetched(base)
        self.assert_reads(image, self.opened(image, base))
        self.assertLessEqual(fetched(base) - before, (AT_MOST - 1) * image.size)

    def test_nobody_probes_its_bcache_device(self) -> None:
        self.opened(*self.new_base(size=1 << 20))
        (device,) = Path("/sys/block").glob("bcache*")
        run(["udevadm", "trigger", "--settle", "--action=change", str(device)])
        links = run(["udevadm", "info", "--query=symlink", str(device)]).stdout.split()
        self.assertEqual([f"virtman/{device.name}"], links, "the one by which LVM leaves it alone")

    def test_nothing_is_read_of_an_image_that_is_only_opened(self) -> None:
        loops.remove_unused()
        image, base = self.new_base(size=16 << 20)
        before = fetched(base)
        self.opened(image, base)
        run(["udevadm", "settle"])
        self.assertEqual(0, fetched(base) - before)

    def test_many_may_ask_for_figures_at_once(self) -> None:
        image, base = self.new_base(size=1 << 20)
        self.opened(image, base)
        with ThreadPoolExecutor(8) as pool:
            held = {stats.held_bytes for stats in pool.map(self.cache.stats, [image] * 24)}
        self.assertEqual({self.cache.stats(image).held_bytes}, held)

    def test_memory_is_given_back_when_nothing_was_fetched_since_the_figures_before(self) -> None:
        image, base = self.new_base(size=8 << 20)
        self.assert_reads(image, self.opened(image, base))
        held = []
        for _ in range(3):
            held.append(buffers())
            self.cache.stats(image)
        self.assertLess(abs(held[1] - held[0]), image.size // 2)
        self.assertGreater(held[1] - buffers(), image.size // 2)

    def test_an_image_is_opened_and_closed_where_there_is_no_room_for_a_note_of_it(self) -> None:
        image, base = self.new_base(size=1 << 20)
        note = file_of(self.place.state / "cache", image, "held")
        note.mkdir()  # as where there is no room
        self.assert_reads(image, self.opened(image, base))
        self.cache.stats(image)
        self.cache.close(image)
        self.assertTrue(note.is_dir())

    def test_an_opening_that_was_cut_short_is_finished(self) -> None:
        image, base = self.new_base(size=1 << 20)
        path = self.opened(image, base)
        devmapper.remove(path.name)
        self.assertEqual(path, self.opened(image, base))
        self.assert_reads(image, path)

    def test_a_damaged_pool_or_header_starts_empty(self) -> None:
        image, base = self.new_base(size=1 << 20)
        for pattern, superblock in (("pool", SHIFT), ("*.header", SUPERBLOCK_AT)):
            self.assert_reads(image, self.opened(image, base))
            self.cache.close(image)
            (file,) = (self.place.state / "cache").glob(pattern)
            damage(file, superblock)
        self.assert_reads(image, self.opened(image, base))

    def test_a_fast_reader_fetches_once_while_the_kernel_thinks_all_it_reads_is_old(self) -> None:
        """That is so until 1/128 of the volume was read; after its first free buckets it takes others."""
        self.cache = BcacheCache(self.place, pool_size=8 << 30)
        self.check_fetched_once(*self.new_base(size=48 << 20), [1 << 20], direct=True)

    def test_a_volume_that_is_not_nearly_empty_any_more_throws_away_what_was_not_used_for_longest(self) -> None:
        self.cache = BcacheCache(self.place, pool_size=512 << 20)
        image, base = self.new_base(size=24 << 20)
        path = self.opened(image, base)
        (policy,) = Path("/sys/fs/bcache").glob("*-*/cache0/cache_replacement_policy")
        self.assertIn("[random]", policy.read_text())
        self.assert_reads(image, path)
        self.cache.group.tend_volume(self.place.state / "cache/pool")
        self.assertIn("[lru]", policy.read_text())

    def test_an_image_that_fell_beside_its_cache_or_whose_return_was_cut_short_is_returned_by_the_next_look(
        self,
    ) -> None:
        image, base = self.new_base(size=1 << 20)
        path = self.opened(image, base)
        self.assert_reads(image, path)
        for _ in range(3):  # until nothing is to be done
            self.cache.stats(image)
        first = devmapper.numbers_in(devmapper.table(path.name))[0]
        for harm in (f"fail_path {first}", "switch_group 2"):
            for look in (self.cache, self.new_cache()):
                devmapper.message(path.name, harm)
                self.assert_reads(image, path)
                look.stats(image)
                before = fetched(base)
                self.assert_reads(image, path)
                self.assertLessEqual(fetched(base) - before, image.size // 20)
                for _ in range(3):
                    self.cache.stats(image)


def buffers() -> int:
    """Bytes of block devices in memory."""
    (line,) = (line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("Buffers:"))
    return int(line.split()[1]) * 1024


def damage(file: Path, start: int) -> None:
    """Overwrite a superblock but for what names it."""
    with file.open("r+b") as opened:
        opened.seek(start + 4096 + 72)
        opened.write(b"damage")
