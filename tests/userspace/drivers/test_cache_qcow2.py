"""Caches over a real parent: what they keep, and what they throw away after a crash."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

from drivers.base import CacheStats
from drivers.cache.qcow2 import CLUSTER_SIZE, Qcow2Cache
from drivers.errors import CommandFailed, NoSpace, NotServing
from drivers.qemu.qcow2file import read_header
from tests.limits import killed_at_its_end
from tests.patience import wait_until
from tests.userspace.drivers.hosts import MIB, HostCase


class CacheCase(HostCase):
    """An origin ``up`` and a host ``h`` with a stack over it."""

    size = 8 * MIB

    def setUp(self) -> None:
        super().setUp()
        self.image, self.file, (self.up, self.h) = self.chain(1, self.size)

    @property
    def cache_file(self) -> Path:
        return self.h.place.state / "cache" / f"{self.image.key}-{self.image.name}.qcow2"

    @property
    def note(self) -> Path:
        return self.cache_file.with_suffix(".json")

    def noted_boot(self) -> object:
        return json.loads(self.note.read_text())["boot_id"]

    def stop(self) -> None:
        """End the stack in good order."""
        self.h.export.withdraw(self.image.name)
        self.h.attach.disconnect(self.image.name)
        self.h.cache.close(self.image)

    def fill(self) -> None:
        """Read the whole image through the host."""
        self.assert_same(self.h.uri(self.image), self.file)

    def cut_parents_off(self) -> None:
        self.up.export.withdraw(self.image.name)


class KeepTest(CacheCase):
    def test_a_read_holds_its_clusters(self) -> None:
        self.read_image(self.h, self.image, 3 * CLUSTER_SIZE, 2 * CLUSTER_SIZE)
        self.assertEqual(2 * CLUSTER_SIZE, self.h.held(self.image))
        self.read_image(self.h, self.image, 3 * CLUSTER_SIZE, 512)
        self.assertEqual(2 * CLUSTER_SIZE, self.h.held(self.image))

    def test_what_was_read_needs_no_parent_zeros_included(self) -> None:
        self.read_image(self.h, self.image, 2 * MIB, 2 * MIB)  # the second half is zeros
        self.cut_parents_off()
        self.read_image(self.h, self.image, 2 * MIB, 2 * MIB)
        self.assertEqual(2 * MIB, self.h.held(self.image))

    def test_stats_are_the_same_when_the_stack_is_gone(self) -> None:
        self.fill()
        self.assertEqual(self.size, self.h.held(self.image))
        self.stop()
        stats = self.h.cache.stats(self.image)
        self.assertEqual(CacheStats(self.size, self.cache_file.stat().st_blocks * 512), stats)

    def test_last_partial_cluster_is_held_and_correct(self) -> None:
        image, file = self.make_image(MIB + 512, "odd")
        self.up.serve_file(image, file)
        self.h.join(image, [self.up])
        self.assert_same(self.h.uri(image), file)
        self.assertEqual(image.size, self.h.held(image))

    def test_stats_of_a_daemon_that_does_not_answer_fail(self) -> None:
        pid = self.h.daemon(self.image).pid
        os.kill(pid, 19)
        self.addCleanup(os.kill, pid, 18)
        self.assertRaises(NotServing, self.h.cache.stats, self.image)


class ReopenTest(CacheCase):
    def reopen(self) -> None:
        self.h.join(self.image, [self.up])

    def test_killed_daemon_costs_only_what_was_read_since_the_last_stats(self) -> None:
        self.read_image(self.h, self.image, 0, MIB)
        self.h.cache.stats(self.image)
        self.read_image(self.h, self.image, MIB, MIB)
        self.h.kill_daemon(self.image)
        self.assertTrue(read_header(self.cache_file).dirty)
        self.reopen()
        self.assertIn(self.h.held(self.image), (MIB, 2 * MIB))
        self.assertFalse(read_header(self.cache_file).dirty)
        self.fill()

    def test_cache_open_when_the_host_went_down_is_thrown_away(self) -> None:
        self.fill()
        self.h.cache.stats(self.image)
        self.h.kill_daemon(self.image)
        self.note.write_text(json.dumps({"boot_id": "another boot"}))
        self.reopen()
        self.assertEqual(0, self.h.held(self.image))
        self.fill()

    def test_clean_cache_that_nobody_closed_before_the_host_went_down_is_thrown_away(self) -> None:
        self.fill()
        self.h.export.withdraw(self.image.name)
        self.assertFalse(read_header(self.cache_file).dirty)
        self.note.write_text(json.dumps({"boot_id": "another boot"}))
        self.reopen()
        self.assertEqual(0, self.h.held(self.image))

    def test_closing_leaves_no_note_and_a_cache_that_is_used_after_a_reboot(self) -> None:
        self.fill()
        self.assertEqual(Path("/proc/sys/kernel/random/boot_id").read_text().strip(), self.noted_boot())
        self.stop()
        self.assertFalse(self.note.exists())
        self.reopen()
        self.assertEqual(self.size, self.h.held(self.image))


class DamageTest(CacheCase):
    """A file that was closed cleanly and is not what it was."""

    def setUp(self) -> None:
        super().setUp()
        self.fill()
        self.stop()

    def assert_thrown_away(self) -> None:
        self.h.cache.open(self.image, self.h.attach.connect(self.image, [self.up.parent]))
        header = read_header(self.cache_file)
        self.assertEqual((0, None, False), (self.h.held(self.image), header.backing, header.external_data))
        self.h.join(self.image, [self.up])
        self.fill()

    def test_it_is_thrown_away(self) -> None:
        of_size, elsewhere = str(self.image.size), f"data_file={self.root}/elsewhere"
        for damage in (
            lambda: self.cache_file.write_bytes(b"garbage" * 1000),
            lambda: os.truncate(self.cache_file, self.cache_file.stat().st_size // 2),
            lambda: self.make(str(MIB)),
            lambda: self.make(of_size, "-b", str(self.file), "-F", "raw"),
            lambda: self.make(of_size, "-o", elsewhere),
            self.mark_corrupt,
        ):
            damage()
            self.assert_thrown_away()
            self.stop()

    def mark_corrupt(self) -> None:
        with self.cache_file.open("r+b") as file:
            file.seek(79)  # the lowest byte of incompatible_features
            file.write(b"\x02")

    def make(self, size: str, *options: str) -> None:
        self.cache_file.unlink()
        argv = ["qemu-img", "create", "-f", "qcow2", *options, str(self.cache_file), size]
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)


class FullDiskTest(HostCase):
    def test_caches_leave_the_reserve_to_vms_however_fast_they_are_filled_and_take_in_what_becomes_free(self) -> None:
        h, up = self.hosts(2)
        self.small_file_system(h.place.state, 48 * MIB)
        self.addCleanup(h.remove)
        h.place = replace(h.place, reserve=4 * MIB)
        h.restart()
        large = h.place.state / "large"
        large.write_bytes(bytes(32 * MIB))
        images = [self.make_image(8 * MIB, name) for name in ("one", "two")]
        for image, file in images:
            up.serve_file(image, file)
            h.join(image, [up])

        def held_after_reading_all() -> int:
            for image, file in images:
                self.assert_same(h.uri(image), file)
            self.assertGreaterEqual(shutil.disk_usage(h.place.state).free, 4 * MIB)
            return sum(h.held(image) for image, _ in images)

        self.assertGreater(held_after_reading_all(), 0)
        h.restart()
        large.unlink()
        wait_until(lambda: held_after_reading_all() == 2 * 8 * MIB)

    def test_new_cache_on_a_full_disk_is_refused(self) -> None:
        h = self.host("h")
        self.small_file_system(h.place.state, MIB // 2)
        h.cache = Qcow2Cache(h.place)
        image, file = self.make_image(MIB)
        up = self.host("up")
        up.serve_file(image, file)
        self.assertRaises(NoSpace, h.open, image, [up])
        self.assertEqual(frozenset(), h.cache.existing())

    def test_new_cache_that_cannot_be_written_leaves_nothing(self) -> None:
        for files, error in ((1, CommandFailed), (2, NoSpace)):  # the folder, the cache, and no room for its note
            h = self.host(f"h{files}")
            self.small_file_system(h.place.state, 3 * MIB, files=files)
            h.cache = Qcow2Cache(h.place)
            image, file = self.make_image(MIB)
            up = self.host(f"up{files}")
            up.serve_file(image, file)
            self.assertRaises(error, h.open, image, [up])
            self.assertEqual([], list((h.place.state / "cache").iterdir()))

    def test_new_cache_that_was_not_made_to_the_end_leaves_nothing(self) -> None:
        h, up = self.hosts(2)
        image, file = self.make_image(MIB)
        up.serve_file(image, file)
        with killed_at_its_end("qemu-img"):
            self.assertRaises(CommandFailed, h.open, image, [up])
        self.assertEqual([], list((h.place.state / "cache").iterdir()))
