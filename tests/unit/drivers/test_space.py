"""Disk space."""

from __future__ import annotations

import shutil
from pathlib import Path

from testtools import TestCase

from drivers.host.space import shortage
from tests.unit.virtman.scene import folder_for


class ShortageTest(TestCase):
    def test_it_is_told_where_less_is_free_than_needed(self) -> None:
        folder = folder_for(self)
        free = shutil.disk_usage(folder).free
        self.assertEqual("", shortage(folder, free // 2))
        self.assertIn(str(folder), shortage(folder, 2 * free))

    def test_a_folder_that_cannot_be_asked_is_told_of(self) -> None:
        self.assertIn("/nonexistent", shortage(Path("/nonexistent"), 1))
