"""Disk space."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from unittest import mock

from testtools import TestCase

from drivers.cache.cachevolumes import SHIFT, Volumes
from drivers.host.space import Room, allocate, shortage
from tests.unit.virtman.scene import folder_for

MIB, GIB = 1 << 20, 1 << 30


class ShortageTest(TestCase):
    def test_it_is_told_where_less_is_free_than_needed(self) -> None:
        folder = folder_for(self)
        free = shutil.disk_usage(folder).free
        self.assertEqual("", shortage(folder, free // 2))
        self.assertIn(str(folder), shortage(folder, 2 * free))

    def test_a_folder_that_cannot_be_asked_is_told_of(self) -> None:
        self.assertIn("/nonexistent", shortage(Path("/nonexistent"), 1))


class HolesTest(TestCase):
    def test_a_copy_gets_all_its_space_and_keeps_what_it_holds(self) -> None:
        file = folder_for(self) / "data"
        file.write_bytes(bytes(MIB) + b"data")
        copy, content = file.with_name("copy"), file.read_bytes()
        subprocess.check_call(["cp", "--sparse=always", file, copy])
        self.assertLess(copy.stat().st_blocks * 512, MIB)
        allocate(copy, MIB)
        self.assertGreaterEqual(copy.stat().st_blocks * 512, MIB)
        self.assertEqual(content, copy.read_bytes())


class ShareTest(TestCase):
    """What is kept for VMs that write, and what caches take of the rest."""

    def test_a_share_of_a_file_system_is_kept_unless_told_otherwise(self) -> None:
        folder = folder_for(self)
        for total, kept in ((100 * GIB, 3 * GIB), (20 * GIB, GIB), (5 * GIB, GIB // 2)):
            with mock.patch.object(shutil, "disk_usage", return_value=mock.Mock(total=total)):
                self.assertEqual(kept, Room(folder).reserve(folder))

    def test_the_first_volume_takes_a_quarter_of_what_is_spare_or_as_much_as_a_file_may(self) -> None:
        for most, taken in ((GIB, 32 * MIB), (24 * MIB, 24 * MIB)):
            room = mock.Mock(spare=lambda _folder: 128 * MIB)
            folder = folder_for(self)
            with mock.patch("drivers.cache.cachevolumes.run"):  # make-bcache
                Volumes(file_size=most, bucket=512 << 10, room=room).make(folder / "pool", [])
            self.assertEqual(SHIFT + taken, (folder / "pool").stat().st_size)
