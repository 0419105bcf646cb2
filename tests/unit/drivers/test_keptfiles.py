"""Files that stay open: ordinary ones, and one of the kernel's that goes."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from testtools import TestCase

from drivers.host.keptfiles import KeptFiles
from tests.unit.drivers.openfiles import open_files, process_file


class KeptFilesTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = Path(tempfile.mkdtemp(prefix="vm-"))
        self.addCleanup(shutil.rmtree, self.folder)
        self.first, self.second = self.file("first", "1"), self.file("second", "2")
        self.files = KeptFiles()
        self.addCleanup(self.files.close)

    def file(self, name: str, text: str) -> str:
        """A file of this name that says so from now on."""
        path = self.folder / name
        path.write_text(text)
        return str(path)

    def opened(self) -> int:
        """How many files of the folder this process has open."""
        links = list(Path("/proc/self/fd").iterdir())
        return len([link for link in links if os.path.realpath(link).startswith(str(self.folder))])

    def test_it_tells_what_a_file_says_now_and_opens_it_once(self) -> None:
        for text in ("1", "another", ""):
            self.file("first", text)
            self.assertEqual(text, self.files.read(self.first))
            self.assertEqual(1, self.opened())

    def test_what_is_not_there_is_an_error_until_it_is(self) -> None:
        self.assertRaises(FileNotFoundError, self.files.read, f"{self.folder}/third")
        self.assertEqual("here", self.files.read(self.file("third", "here")))

    def test_one_that_cannot_be_read_any_more_is_opened_anew(self) -> None:
        before = open_files()
        with process_file() as file:
            self.assertIn(" (sleep) ", self.files.read(file))
        self.assertRaises(ProcessLookupError, self.files.read, file)
        self.assertEqual(before, open_files())
        self.assertRaises(FileNotFoundError, self.files.read, file)

    def test_those_that_are_not_kept_are_closed(self) -> None:
        self.files.read(self.first)
        self.files.read(self.second)
        self.files.keep([self.second, f"{self.folder}/third"])
        self.assertEqual(1, self.opened())
        self.assertEqual("2", self.files.read(self.second))
        self.files.close()
        self.assertEqual(0, self.opened())
