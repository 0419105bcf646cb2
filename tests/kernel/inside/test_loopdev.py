"""Loop devices over files of the guest's disk, and of one with larger sectors."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from testtools import TestCase

from drivers import loopdev
from drivers.command import run
from tests.kernel.inside.filesystems import small_file_system


class LoopsTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
        self.addCleanup(shutil.rmtree, self.folder)

    def kind(self, folder: Path) -> str:
        """Whether the loop device of a file goes past the page cache, and the bytes of its sectors."""
        file = folder / "file"
        file.write_bytes(bytes(1 << 20))
        self.addCleanup(loopdev.detach, file)
        return " ".join(run(["losetup", "-n", "-O", "DIO,LOG-SEC", str(loopdev.attach(file))]).stdout.split())

    def test_a_file_is_read_past_the_page_cache(self) -> None:
        self.assertEqual("1 512", self.kind(self.folder))

    def test_sectors_are_of_512_bytes_also_on_a_disk_with_larger_ones_and_the_log_says_what_that_costs(self) -> None:
        with self.assertLogs("drivers.loopdev", "INFO") as logged:
            self.assertEqual("0 512", self.kind(small_file_system(self, self.folder, "16M", sector=4096)))
        self.assertIn("page cache", logged.output[0])
