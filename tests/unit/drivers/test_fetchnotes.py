"""How much was fetched for an image, over openings and volumes."""

from __future__ import annotations

from testtools import TestCase

from drivers.cache import fetchnotes
from drivers.cache.fetchnotes import Note
from tests.unit.virtman.scene import folder_for


class FetchNotesTest(TestCase):
    def test_what_was_fetched_adds_up_over_openings(self) -> None:
        note = Note().opened("volume", 0).counted("volume", 5).opened("volume", 1)  # the kernel has looked at it by now
        self.assertEqual(5 + 2, note.counted("volume", 3).held)

    def test_what_was_fetched_for_another_volume_or_before_there_was_one_does_not_count(self) -> None:
        note = Note().opened("", 0).counted("", 9).counted("volume", 10)
        self.assertEqual(1, note.counted("volume", 11).held)
        self.assertEqual(0, note.opened("other", 0).held)

    def test_one_that_cannot_be_read_or_written_is_none(self) -> None:
        file = folder_for(self) / "note"
        for text in ("{", "[]", '{"other": 1}'):
            file.write_text(text)
            self.assertEqual(Note(), fetchnotes.read(file))
        file.unlink()
        file.mkdir()  # as where there is no room
        fetchnotes.write(file, Note("volume"))
        self.assertEqual(Note(), fetchnotes.read(file))
