"""Cards of images."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path, PurePosixPath

import testtools

from opennebula_tm.driver.card import Card, Cards, Kept
from opennebula_tm.driver.errors import FrontendFailed, Refused
from tests.unit.virtman.scene import folder_for

NAME = "one-7-0a1b2c3d"
CARD = Card(NAME, "raw", ("a", "b"), NAME, "sha256:1", 3, Kept(f"{NAME}-k3", ("a",), NAME, "one-1-0-a"), "")


class CardTest(testtools.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.path = PurePosixPath(folder_for(self)) / NAME
        self.cards = Cards()

    def test_what_is_written_is_read(self) -> None:
        self.assertIn("there is no card", str(self.assertRaises(Refused, self.cards.read, self.path)))
        for card in (CARD, replace(CARD, kept=None)):
            self.cards.write(self.path, card)
            self.assertEqual(card, self.cards.read(self.path))

    def test_what_is_no_name_of_ours_is_neither_read_nor_written_nor_locked(self) -> None:
        for name in ("passwd", "one-7-0a1b2c3", "one-x-0a1b2c3d", ".one-7-0a1b2c3d", "one-7-0a1b2c3d.lock"):
            path = self.path.with_name(name)
            self.assertRaises(Refused, self.cards.read, path)
            self.assertRaises(Refused, self.cards.write, path, CARD)
            self.assertRaises(Refused, self.cards.locked(path).__enter__)

    def test_one_that_is_damaged_is_told(self) -> None:
        for text in ("", "{", "[]", '{"version": 1}', '{"version": 1, "kept": {"x": 1}}', '"text"', "\0"):
            Path(self.path).write_text(text)
            self.assertRaises(FrontendFailed, self.cards.read, self.path)

    def test_names_are_given_once(self) -> None:
        first, name = CARD.next_name("g")
        second, other = first.next_name("k")
        self.assertEqual((f"{NAME}-g4", f"{NAME}-k5", 5), (name, other, second.generation))

    def test_an_image_that_holds_nothing_yet_is_not_handed_out(self) -> None:
        self.assertEqual(NAME, CARD.published)
        self.assertRaises(Refused, lambda: replace(CARD, image="").published)

    def test_two_do_not_hold_the_lock_at_once(self) -> None:
        entered = threading.Event()

        def other() -> None:
            with Cards().locked(self.path):
                entered.set()

        thread = threading.Thread(target=other)
        with self.cards.locked(self.path):
            thread.start()
            self.assertFalse(entered.wait(0.05))
        thread.join(30)
        self.assertTrue(entered.is_set())
