"""How much was fetched for an image, over openings, volumes, and a file system without room."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from testtools import TestCase

from drivers.base import Image
from drivers.cache.cachefiles import file_of
from drivers.cache.fetchnotes import FetchNotes, Note
from tests.limits import no_more_files
from tests.unit.logs import Logged

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

    def without_room(self) -> None:
        """No note can be written until ``with_room``."""
        file_of(self.folder, IMAGE, "json.new").symlink_to("/dev/full")

    def with_room(self) -> None:
        file_of(self.folder, IMAGE, "json.new").unlink()

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

    def test_without_room_at_an_opening_the_figure_begins_anew_and_is_never_below_nothing(self) -> None:
        self.notes.begin(IMAGE, "", 0)
        self.notes.count(IMAGE, "volume", 300 * MIB)
        self.notes.count(IMAGE, "volume", 310 * MIB)
        self.without_room()
        self.notes.begin(IMAGE, "volume", 0)
        self.with_room()
        self.notes.count(IMAGE, "volume", 5 * MIB)
        self.assertEqual(0, self.held())
        self.notes.count(IMAGE, "volume", 7 * MIB)
        self.assertEqual(2 * MIB, self.held())

    def test_a_basis_that_is_wrong_all_the_same_gives_no_figure_below_nothing(self) -> None:
        self.notes.begin(IMAGE, "", 0)
        self.notes.count(IMAGE, "volume", 300 * MIB)
        self.notes.count(IMAGE, "volume", 5 * MIB)  # the opening in between was cut off
        self.assertEqual(0, self.held())

    def test_a_lack_of_room_is_said_once_until_there_is_room(self) -> None:
        said = Logged(self, "drivers.cache.fetchnotes")
        for _ in range(2):
            self.without_room()
            for counted in range(10, 13):
                self.notes.count(IMAGE, "volume", counted)
            self.with_room()
            self.notes.count(IMAGE, "volume", 9)
        self.assertEqual(2, len(said.lines), str(said.lines))

    def test_one_that_cannot_be_read_is_none(self) -> None:
        self.notes.count(IMAGE, "volume", MIB)
        with no_more_files():
            self.assertEqual(Note(), self.notes.of(IMAGE))
        file_of(self.folder, IMAGE, "json").write_text("{")
        self.assertEqual(Note(), self.notes.of(IMAGE))
        self.notes.forget(IMAGE)
        self.notes.forget(IMAGE)
        self.assertEqual(Note(), self.notes.of(IMAGE))
