"""The pure parts of the kernel lab's root."""

from __future__ import annotations

from testtools import TestCase

from lab.kernel.root import MASKED, NEEDED, recipe_hash


class RecipeHashTest(TestCase):
    def test_another_release_is_another_root(self) -> None:
        self.assertNotEqual(recipe_hash("bookworm"), recipe_hash("trixie"))


class UnitsTest(TestCase):
    def test_what_is_needed_would_be_masked_otherwise(self) -> None:
        self.assertEqual(set(), set(NEEDED) - set(MASKED))
