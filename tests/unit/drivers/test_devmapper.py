"""What is read in tables of device-mapper."""

from __future__ import annotations

from testtools import TestCase

from drivers.kernel.devmapper import groups_in, numbers_in


class TableTest(TestCase):
    def test_paths_and_their_groups(self) -> None:
        """As dmsetup prints them, and as they are loaded."""
        head = "0 8192 multipath 3 queue_if_no_path queue_mode bio 0"
        for table, numbers, groups in (
            (f"{head} 0 0", [], 0),
            (f"{head} 2 1 service-time 0 1 2 8:0 1 1 service-time 0 1 2 8:16 1 1", ["8:0", "8:16"], 2),
            (f"{head} 2 1 round-robin 0 2 1 8:0 1 8:16 1 round-robin 0 1 1 8:32 1", ["8:0", "8:16", "8:32"], 2),
            ("0 8192 multipath 1 queue_if_no_path 0 1 1 queue-length 0 2 0 8:0 65:16", ["8:0", "65:16"], 1),
        ):
            self.assertEqual((numbers, groups), (numbers_in(table), groups_in(table)), table)
