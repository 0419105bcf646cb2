"""How much was fetched for an image, over openings, volumes, and a file system without room."""

from __future__ import annotations

import json
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

    def test_without_room_at_an_opening_the_figure_of_the_next_agent_begins_anew(self) -> None:
        self.notes.begin(IMAGE, "", 0)
        self.notes.count(IMAGE, "volume", 300 * MIB)
        self.notes.count(IMAGE, "volume", 310 * MIB)
        self.without_room()
        self.notes.begin(IMAGE, "volume", 0)
        self.assertEqual(10 * MIB, self.notes.of(IMAGE).now)
        self.with_room()
        notes = FetchNotes(self.folder)
        notes.count(IMAGE, "volume", 5 * MIB)
        self.assertEqual(0, self.held())
        notes.count(IMAGE, "volume", 7 * MIB)
        self.assertEqual(2 * MIB, self.held())

    def test_a_basis_that_is_wrong_all_the_same_gives_no_figure_below_nothing(self) -> None:
        self.notes.begin(IMAGE, "", 0)
        self.notes.count(IMAGE, "volume", 300 * MIB)
        for prepare in (self.without_room, self.with_room):
            prepare()
            self.notes.count(IMAGE, "volume", 5 * MIB)  # the opening in between was cut off
            self.assertEqual((0, 0), (self.held(), self.notes.of(IMAGE).now))

    def test_nor_does_a_note_of_an_earlier_release(self) -> None:
        self.written().write_text(json.dumps({"volume": "volume", "before": -MIB, "now": -MIB}))
        self.assertEqual(0, self.held())
        self.notes.begin(IMAGE, "volume", 0)
        self.notes.count(IMAGE, "volume", 2 * MIB)
        self.assertEqual(2 * MIB, self.held())

    def test_without_room_what_is_counted_is_remembered_and_written_down_when_there_is_room(self) -> None:
        self.notes.begin(IMAGE, "volume", 0)
        self.notes.count(IMAGE, "volume", 3 * MIB)
        self.without_room()
        self.notes.count(IMAGE, "volume", 5 * MIB)
        self.assertEqual((3 * MIB, 5 * MIB), (self.held(), self.notes.of(IMAGE).now))
        self.with_room()
        self.notes.count(IMAGE, "volume", 5 * MIB)
        self.assertEqual(5 * MIB, self.held())

    def test_without_room_at_an_opening_the_image_is_known_to_be_in_its_volume(self) -> None:
        self.without_room()
        self.notes.begin(IMAGE, "volume", 0)
        self.assertEqual("volume", self.notes.of(IMAGE).volume)

    def test_an_agent_without_a_file_left_counts_on_from_what_is_written_later(self) -> None:
        self.notes.begin(IMAGE, "volume", 0)
        self.notes.count(IMAGE, "volume", 8 * MIB)
        notes = FetchNotes(self.folder)
        with no_more_files():
            notes.count(IMAGE, "volume", 9 * MIB)
            self.assertEqual(Note(), notes.of(IMAGE))
        notes.count(IMAGE, "volume", 10 * MIB)
        self.assertEqual(10 * MIB, self.held())

    def test_what_cannot_be_done_is_said_once_until_it_can(self) -> None:
        said = Logged(self, "drivers.cache.fetchnotes")
        for _ in range(2):
            self.without_room()
            for counted in range(10, 13):
                self.notes.count(IMAGE, "volume", counted)
            self.with_room()
            self.notes.count(IMAGE, "volume", 9)
        self.assertEqual(2, len(said.lines), str(said.lines))

    def test_nor_is_what_cannot_be_read_said_with_each_look(self) -> None:
        said = Logged(self, "drivers.cache.fetchnotes")
        self.written().mkdir()
        for _ in range(3):
            self.notes.of(IMAGE)
            self.notes.count(IMAGE, "volume", MIB)
        self.assertEqual(2, len(said.lines), str(said.lines))

    def test_one_that_makes_no_sense_is_none(self) -> None:
        for text in ("{", "[]", '{"other": 1}'):
            self.written().write_text(text)
            self.assertEqual(Note(), self.notes.of(IMAGE))

    def test_what_was_fetched_for_an_image_that_was_forgotten_does_not_count(self) -> None:
        for forget in (self.forget, self.remove_files):
            self.notes.begin(IMAGE, "volume", 0)
            self.without_room()
            self.notes.count(IMAGE, "volume", 8 * MIB)
            self.with_room()
            for _ in range(2):
                forget()
            self.assertEqual(Note(), self.notes.of(IMAGE))

    def forget(self) -> None:
        self.notes.forget(IMAGE)

    def remove_files(self) -> None:
        self.written().unlink(missing_ok=True)
        known = self.notes.of(IMAGE)
        self.notes.forget_all("b" * 64)
        self.assertEqual(known, self.notes.of(IMAGE))
        self.notes.forget_all(IMAGE.key)

    def written(self) -> Path:
        return file_of(self.folder, IMAGE, "json")
