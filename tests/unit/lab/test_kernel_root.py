"""The pure parts of the kernel lab's root."""

from __future__ import annotations

import re

from testtools import TestCase

from lab.kernel.root import MASKED, NEEDED, recipe_hash, requirements


class RecipeHashTest(TestCase):
    def test_another_release_is_another_root(self) -> None:
        self.assertNotEqual(recipe_hash("bookworm"), recipe_hash("trixie"))


class UnitsTest(TestCase):
    def test_what_is_needed_would_be_masked_otherwise(self) -> None:
        self.assertEqual(set(), set(NEEDED) - set(MASKED))


class RequirementsTest(TestCase):
    def test_they_are_the_projects_and_its_tests_and_no_library_that_would_have_to_be_compiled(self) -> None:
        names = {re.split("[<>=]", one)[0] for one in requirements()}
        self.assertEqual({"click", "pytest"}, names & {"click", "pytest", "ruff", "libvirt-python"})
