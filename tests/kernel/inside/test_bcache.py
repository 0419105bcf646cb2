"""The bcache driver over a base of known content, whose own counter says what was fetched."""

from __future__ import annotations

import mmap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from platform import freedesktop_os_release

from drivers.base import Device, Image
from drivers.cache import onefetch
from drivers.cache.bcache import SPLIT, SUPERBLOCK_AT, BcacheCache
from drivers.cache.cachefiles import file_bytes, file_of
from drivers.cache.cachevolumes import SHIFT
from drivers.errors import BadDevice, CommandFailed, InUse
from drivers.host.command import run
from drivers.kernel import devmapper
from tests.kernel.inside import caches, loops
from tests.kernel.inside.bcachecase import BcacheCase
from tests.kernel.inside.caches import ALIGNED, AT_MOST, content, fetched, requests, sets

SIZES = (4096, 128 << 10, 1 << 20)


class ContractTest(BcacheCase, caches.ContractCase):
    """The contract of all cache drivers."""


class BcacheTest(BcacheCase):
    """One volume."""

    def test_direct_reads_of_any_size_are_fetched_once(self) -> None:
        self.check_fetched_once(*self.new_base(), SIZES, direct=True)

    def test_buffered_reads_of_any_size_are_fetched_once(self) -> None:
        self.check_fetched_once(*self.new_base(), SIZES, direct=False)

    def test_ten_readers_at_once_fetch_once(self) -> None:
        self.check_readers_at_once_fetch_once()

    def test_a_miss_is_one_request_where_loop_devices_hand_on_whole_ones_and_one_for_each_page_elsewhere(self) -> None:
        image, base = self.new_base()
        path, before = self.opened(image, base), requests(base)
        content(path, SPLIT, direct=True, start=ALIGNED, end=ALIGNED + SPLIT)
        of_pages, whole = (SPLIT // mmap.PAGESIZE, mmap.PAGESIZE), (1, SPLIT)
        release = freedesktop_os_release()["VERSION_ID"]
        self.assertEqual({"12": of_pages, "13": whole}[release], (requests(base) - before, onefetch.piece()))

    def test_two_images_share_the_pool_and_one_leaves_while_the_other_is_read(self) -> None:
        image, base = self.new_base("one", 8 << 20)
        other, other_base = self.new_base("two", 8 << 20)
        path, other_path = self.opened(image, base), self.opened(other, other_base)
        self.assertEqual(1, len(sets()))
        self.assert_reads(image, path)
        self.assert_reads(other, other_path)
        self.cache.close(other)
        before = fetched(base)
        self.assert_reads(image, path)
        self.assertLessEqual(fetched(base) - before, (AT_MOST - 1) * image.size)

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

    def test_a_new_agent_finds_and_closes_what_the_old_one_opened(self) -> None:
        image, base = self.new_base(size=1 << 20)
        path = self.opened(image, base)
        again = BcacheCache(self.place)
        self.assertEqual(path, again.open(image, base).path)
        again.close(image)
        again.close(image)
        self.assertFalse(path.exists())

    def test_an_image_is_opened_and_closed_where_there_is_no_room_for_a_note_of_it(self) -> None:
        image, base = self.new_base(size=1 << 20)
        note = file_of(self.place.state / "cache", image, "json")
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

    def test_a_removed_image_is_never_read_again(self) -> None:
        image, base = self.new_base(size=4 << 20)
        path = self.opened(image, base)
        self.assert_reads(image, path)
        self.assertRaises(InUse, self.cache.remove, image.key)
        self.cache.close(image)
        size = self.cache.size(image.key)
        self.assertGreater(size, 0)
        self.assertEqual(size, self.cache.remove(image.key))
        self.assertEqual(0, self.cache.remove(image.key))
        self.assertEqual(frozenset(), self.cache.existing())
        # The worst case: another content comes under the same key and name.
        other, other_base = self.new_base("other", 4 << 20)
        disguised = Image(name=image.name, size=other.size, digest=image.digest)
        path = self.opened(disguised, other_base)
        self.assert_reads(other, path)
        self.assert_reads(other, path, 4096)

    def test_a_damaged_pool_starts_empty(self) -> None:
        image, base = self.new_base(size=1 << 20)
        self.assert_reads(image, self.opened(image, base))
        self.cache.close(image)
        damage(self.place.state / "cache/pool", SHIFT)
        self.assert_reads(image, self.opened(image, base))

    def test_a_damaged_header_starts_empty(self) -> None:
        image, base = self.new_base(size=1 << 20)
        self.assert_reads(image, self.opened(image, base))
        self.cache.close(image)
        (header,) = (self.place.state / "cache").glob("*.header")
        damage(header, SUPERBLOCK_AT)
        self.assert_reads(image, self.opened(image, base))

    def test_a_disk_in_use_is_not_closed(self) -> None:
        image, base = self.new_base(size=1 << 20)
        path = self.opened(image, base)
        with path.open("rb"):
            self.assertRaises(CommandFailed, self.cache.close, image)
        self.assert_reads(image, path)

    def test_what_was_made_for_a_base_that_is_missing_is_removed(self) -> None:
        image, _ = self.new_base(size=1 << 20)
        self.assertRaises(CommandFailed, self.cache.open, image, Device(image.size, path=Path("/dev/mapper/none")))

    def test_an_open_image_is_not_opened_over_another_base(self) -> None:
        image, base = self.new_base(size=1 << 20)
        _, other = self.new_base("other", 1 << 20)
        path = self.opened(image, base)
        self.assertRaises(BadDevice, self.cache.open, image, other)
        self.assert_reads(image, path)

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
        self.cache.tend_volume(self.place.state / "cache/pool")
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
