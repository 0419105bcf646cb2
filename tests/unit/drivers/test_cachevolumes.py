"""Volumes on disks that may never answer, for which a FIFO stands to which nobody writes yet."""

from __future__ import annotations

import os
from unittest import mock

from testtools import TestCase

from drivers.cache import cachevolumes
from drivers.cache.cachevolumes import Volumes
from tests.patience import PATIENCE, wait_until
from tests.unit.virtman.scene import folder_for


class MarkTest(TestCase):
    def test_a_disk_that_does_not_answer_is_read_once_and_nobody_waits_for_ever(self) -> None:
        folder = folder_for(self)
        disk = folder / "disk"
        os.mkfifo(disk)
        volumes = Volumes(file_size=0, bucket=0, room=mock.Mock(), limit=1.0)
        with mock.patch.object(cachevolumes, "_READ", 'cat "$1"'):  # opens it once
            for _ in range(3):
                self.assertEqual("", volumes.number(disk))
        (reader,) = volumes._readers.values()
        disk.write_text("virtman cache volume 1")
        wait_until(lambda: reader.poll() is not None)
        disk.unlink()
        disk.write_text("virtman cache volume 2")
        volumes._limit = PATIENCE
        self.assertEqual("2", volumes.number(disk))
