"""Files that are replaced whole. What of them outlives a power cut: tests/userspace/test_power_cuts.py."""

from __future__ import annotations

import stat
from pathlib import Path

from testtools import TestCase

from drivers.host.durable import write_atomically
from tests.unit.virtman.scene import folder_for


class WriteAtomicallyTest(TestCase):
    def test_a_write_that_fails_leaves_the_old_content_and_nothing_else(self) -> None:
        folder = folder_for(self)
        target = folder / "file"
        target.mkdir()  # rename(2) onto a folder fails
        (target / "old").touch()
        self.assertRaises(OSError, write_atomically, target, b"new")
        self.assertEqual([target], list(folder.iterdir()))
        self.assertTrue((target / "old").exists())

    def test_content_is_replaced_whole(self) -> None:
        target = folder_for(self) / "file"
        for content in (b"a much longer content", b"short"):
            write_atomically(target, content)
            self.assertEqual(content, target.read_bytes())

    def test_nobody_else_may_read_it_whoever_might_before(self) -> None:
        target = folder_for(self) / "file"
        target.touch(mode=0o644)
        write_atomically(target, b"secret")
        self.assertEqual(0o600, stat.S_IMODE(target.stat().st_mode))

    def test_a_missing_folder_is_an_error(self) -> None:
        self.assertRaises(FileNotFoundError, write_atomically, Path("/nonexistent/file"), b"")
