"""How much was fetched for an image, over openings, volumes, and a file system without room."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from testtools import TestCase

from drivers.base import Image
from drivers.cache.cachefiles import file_of
from drivers.cache.fetchnotes import FetchNotes, Note

IMAGE = Image("debian", 2 << 30, "sha256:" + "a" * 64)
MIB = 1 << 20


class FetchNotesTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)
        self.notes = FetchNotes(self.folder)

    def held(self) -> int:
        return FetchNotes(self.folder).of(IMAGE).now

    def test_what_was_fetched_adds_up_over_openings(self) -> None:
        self.notes.begin(IMAGE, "volume", 0)
        for counted in (3 * MIB, 5 * MIB):
            self.notes.count(IMAGE, "volume", counted)
            self.assertEqual(counted, self.held())
        self.notes.begin(IMAGE, "volume", MIB)  # the kernel has looked at it by now
        self.notes.count(IMAGE, "volume", 2 * MIB)
        self.assertEqual(6 * MIB, self.held())

    def test_what_was_fetched_for_another_volume_or_before_there_was_one_does_not_count(self) -> None:
        self.notes.begin(IMAGE, "", 0)
        self.notes.count(IMAGE, "", 9 * MIB)
        self.assertEqual(0, self.held())
        self.notes.count(IMAGE, "volume", 10 * MIB)
        self.notes.count(IMAGE, "volume", 11 * MIB)
        self.assertEqual(MIB, self.held())
        self.notes.begin(IMAGE, "other", 0)
        self.assertEqual(0, self.held())

    def test_one_that_makes_no_sense_is_none(self) -> None:
        for text in ("{", "[]", '{"other": 1}'):
            self.written().write_text(text)
            self.assertEqual(Note(), self.notes.of(IMAGE))

    def written(self) -> Path:
        return file_of(self.folder, IMAGE, "json")
