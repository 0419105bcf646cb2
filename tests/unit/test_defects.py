"""The list of hand-made defects fits the code: make defects, which takes long, is not run with every change."""

from __future__ import annotations

from testtools import TestCase

from tests.defects import read


class DefectsTest(TestCase):
    def test_what_each_replaces_stands_in_its_file_once(self) -> None:
        self.assertGreater(len(read()), 200)
