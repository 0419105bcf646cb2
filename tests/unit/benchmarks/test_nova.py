"""A wave of servers by Nova: its plan, its figures, the file that stands for Glance, and what is refused."""

from __future__ import annotations

from typing import Any

from click.testing import CliRunner
from testtools import ExpectedException, TestCase

from benchmarks import nova
from benchmarks.errors import NoRoom
from benchmarks.nova import bytes_moved, check_room, headline, missed, ratios
from benchmarks.openstack.imagefile import CHUNK, ImageFile, metadata
from benchmarks.openstack.plan import IMAGE, NOTHING, VIRTMAN, VOLUME, WAYS, Plan
from tests.unit.virtman.scene import folder_for

PLAN = Plan(servers=60, computes=4, size=2048, data=1024, cinder_at_once=4)


def wave(seconds: float, **moved: int) -> dict[str, Any]:
    """The figures of one."""
    boot_set = {"boot_set_s": seconds + 2, "boot_set_moved": moved}
    return {"s": seconds + 1, "last_disk_s": seconds, "moved": moved, "disk_s": {"max": seconds / 2}, **boot_set}


def waves(virtman_s: float, fetched: int) -> dict[str, Any]:
    """Figures of all ways."""
    return {
        NOTHING: wave(1.0), VIRTMAN: wave(virtman_s, fetched=fetched, agents_read=0),
        IMAGE: wave(20.0, downloaded=4000, downloads=4), VOLUME: wave(41.0, downloaded=60000),
    }  # fmt: skip


class PlanTest(TestCase):
    def test_copies_need_the_most_room(self) -> None:
        self.assertEqual(VOLUME, max(WAYS, key=PLAN.room))
        self.assertEqual(64 * 1024, PLAN.room(VOLUME))


class FiguresTest(TestCase):
    def found(self, virtman_s: float = 2.0, fetched: int = 300) -> dict[str, dict[str, float]]:
        return ratios(headline(waves(virtman_s, fetched)))

    def test_what_crossed_a_link_is_counted_whoever_moved_it(self) -> None:
        self.assertEqual(7, bytes_moved({"fetched": 4, "agents_read": 3}))
        self.assertEqual(9, bytes_moved({"downloaded": 9, "downloads": 2}))

    def test_ours_is_compared_with_each_other_way(self) -> None:
        found = self.found()
        self.assertEqual((10.0, 20.5), tuple(found[way]["times_sooner"] for way in (IMAGE, VOLUME)))
        self.assertEqual((0.075, 0.005), tuple(found[way]["share_of_bytes"] for way in (IMAGE, VOLUME)))
        self.assertEqual(5.5, found[IMAGE]["times_sooner_with_boot_set"])

    def test_each_bar_that_is_missed_is_told(self) -> None:
        self.assertEqual([], missed(self.found()))
        slow = missed(self.found(virtman_s=3.0, fetched=500))
        self.assertEqual(["6.7 times sooner than image; bar: 10", "0.125 of the bytes of image; bar: 0.1"], slow)


class ImageFileTest(TestCase):
    def test_each_download_is_the_file_and_is_counted(self) -> None:
        file, content = folder_for(self) / "image", bytes(CHUNK) + b"end"
        file.write_bytes(content)
        client = ImageFile(file)
        self.assertEqual(content, b"".join(client.call(None, 2, "data", args=("id",))))  # as Nova calls
        self.assertEqual(content, b"".join(client.call(None, "data", "id")))  # as Cinder does
        self.assertEqual((2 * len(content), 2), (client.sent, client.downloads))
        found = metadata("id", file, 1 << 30)
        self.assertEqual((len(content), 1 << 30), (found["size"], found["virtual_size"]))


class RefusalTest(TestCase):
    def test_too_little_room_is_told_in_one_line_before_anything_is_done(self) -> None:
        with ExpectedException(NoRoom, "[^\n]*60 servers of 1000000000 MiB[^\n]*--data"):
            check_room(Plan(60, 4, 2048, 10**9, 4), folder_for(self))

    def test_data_must_fit_and_the_size_be_whole_gib(self) -> None:
        for option, value in (("--data", "17"), ("--data", "4096"), ("--size", "1500")):
            result = CliRunner().invoke(nova.main, [option, value])
            self.assertEqual(2, result.exit_code)
            self.assertIn(f"{option} must be", result.output)
