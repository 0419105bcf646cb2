"""What is read in tables of device-mapper."""

from __future__ import annotations

from testtools import TestCase

from drivers.attach.iscsi import groups_of, table_of
from drivers.base import Image
from drivers.kernel.devmapper import numbers_in
from drivers.kernel.multipath import first_good, good_of, groups_in


class PathsTest(TestCase):
    """The table by which an image's map reads from its parents."""

    def table(self, policy: str, numbers: list[str], resting: int) -> str:
        image = Image("debian", 4 << 20, "sha256:" + "0" * 64)
        table = table_of(image, policy, groups_of(policy, numbers, resting))
        return table.removeprefix("0 8192 multipath 1 queue_if_no_path 0 ")

    def test_those_that_rest_are_read_from_when_no_other_can_be(self) -> None:
        all_of_them = ["8:0", "8:16", "8:32"]
        for resting, table in (
            (0, "1 1 round-robin 0 3 0 8:0 8:16 8:32"),
            (1, "2 1 round-robin 0 2 0 8:0 8:16 round-robin 0 1 0 8:32"),
            (3, "1 1 round-robin 0 3 0 8:0 8:16 8:32"),
        ):
            self.assertEqual(table, self.table("round-robin", all_of_them, resting))

    def test_with_failover_each_is_the_next_ones_last_resort(self) -> None:
        self.assertEqual(
            "2 1 service-time 0 1 0 8:0 service-time 0 1 0 8:16", self.table("failover", ["8:0", "8:16"], 1)
        )
        self.assertEqual("0 0", self.table("failover", [], 0))


class TableTest(TestCase):
    def test_paths_and_their_groups(self) -> None:
        """As dmsetup prints them, and as they are loaded."""
        head = "0 8192 multipath 3 queue_if_no_path queue_mode bio 0"
        for table, groups in (
            (f"{head} 0 0", []),
            (f"{head} 2 1 service-time 0 1 2 8:0 1 1 service-time 0 1 2 8:16 1 1", [["8:0"], ["8:16"]]),
            (f"{head} 2 1 round-robin 0 2 1 8:0 1 8:16 1 round-robin 0 1 1 8:32 1", [["8:0", "8:16"], ["8:32"]]),
            ("0 8192 multipath 1 queue_if_no_path 0 1 1 queue-length 0 2 0 8:0 65:16", [["8:0", "65:16"]]),
        ):
            numbers = [number for group in groups for number in group]
            self.assertEqual((numbers, groups), (numbers_in(table), groups_in(table)), table)

    def test_groups_without_what_has_failed(self) -> None:
        groups = [["8:0"], ["8:16", "8:32"]]
        for failed, good, first in (
            ([], groups, 1),
            (["8:0"], [["8:16", "8:32"]], 2),
            (["8:16"], [["8:0"], ["8:32"]], 1),
            (["8:32", "8:16"], [["8:0"]], 1),
            (["8:0", "8:16"], [["8:32"]], 2),
            (["8:0", "8:16", "8:32", "8:48"], [], 0),
        ):
            self.assertEqual((good, first), (good_of(groups, failed), first_good(groups, failed)))
