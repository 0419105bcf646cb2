"""When the maps come and go by which snapshots are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from testtools import TestCase

from drivers.errors import CommandFailed, DiskInUse
from drivers.kernel import devmapper
from drivers.snapshot.snapshotmaps import SnapshotMaps

TABLE = "0 8 thin"
NAME = "virtman-snapshot-7"


class SnapshotMapsTest(TestCase):
    """With the maps of a kernel double: their tables, and how many have each open."""

    def setUp(self) -> None:
        super().setUp()
        self.tables: dict[str, list[str]] = {}
        self.open: Counter[str] = Counter()
        for name in ("create", "remove", "names", "exists"):
            self.patch(devmapper, name, getattr(self, name))
        self.patch(devmapper, "openers", self.open.__getitem__)
        self.maps = SnapshotMaps()

    def create(self, name: str, table: Iterable[str], *, read_only: bool = False) -> Path:
        self.assertTrue(read_only)
        self.tables.setdefault(name, list(table))
        return Path(name)

    def remove(self, name: str) -> None:
        if self.open[name]:
            raise CommandFailed(["dmsetup", "remove", name], 1, "", "Device or resource busy")
        self.tables.pop(name, None)

    def exists(self, name: str) -> bool:
        return name in self.tables

    def names(self, prefix: str) -> frozenset[str]:
        return frozenset(name for name in self.tables if name.startswith(prefix))

    def test_a_map_is_there_until_the_last_reader_leaves(self) -> None:
        paths = [self.maps.enter(7, TABLE) for _ in range(2)]
        self.assertEqual([Path(NAME)] * 2, paths)
        self.assertEqual({NAME: [TABLE]}, self.tables)
        self.maps.leave(7)
        self.assertEqual({NAME}, set(self.tables))
        self.maps.leave(7)
        self.assertEqual({}, self.tables)
        self.maps.enter(7, TABLE)
        self.maps.leave(7)
        self.assertEqual({}, self.tables)

    def test_one_that_is_read_is_not_cleared(self) -> None:
        self.maps.enter(7, TABLE)
        self.assertRaises(DiskInUse, self.maps.clear, "vm", 7)
        self.maps.clear("vm", 8)
        self.assertEqual({NAME}, set(self.tables))
        self.maps.leave(7)

    def test_one_that_a_program_of_a_killed_agent_reads_is_not_cleared(self) -> None:
        self.tables[NAME], self.open[NAME] = [TABLE], 1
        self.assertRaises(DiskInUse, self.maps.clear, "vm", 7)
        self.open[NAME] = 0
        self.maps.clear("vm", 7)
        self.assertEqual({}, self.tables)

    def test_a_sweep_leaves_those_that_are_read_or_open_and_what_is_no_snapshot(self) -> None:
        self.maps.enter(7, TABLE)
        self.tables |= {"virtman-snapshot-8": [TABLE], "virtman-snapshot-9": [TABLE], "virtman-vm-8": [TABLE]}
        self.open["virtman-snapshot-9"] = 1
        self.maps.sweep()
        self.assertEqual({NAME, "virtman-snapshot-9", "virtman-vm-8"}, set(self.tables))
