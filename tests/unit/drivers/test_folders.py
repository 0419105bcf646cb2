"""Looking into folders."""

from __future__ import annotations

from testtools import TestCase

from drivers.host.folders import matching
from tests.limits import no_more_files
from tests.unit.virtman.scene import folder_for


class MatchingTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = folder_for(self)
        for name in ("a1/x/file", "a2/x/file", "b1/x/file", "a3/y/file"):
            (self.folder / name).parent.mkdir(parents=True)
            (self.folder / name).touch()

    def found(self, *names: str) -> list[str]:
        return [str(path.relative_to(self.folder)) for path in matching(self.folder, *names)]

    def test_what_fits_at_each_depth(self) -> None:
        self.assertEqual(["a1", "a2", "a3"], self.found("a?"))
        self.assertEqual(["a1/x/file", "a2/x/file"], self.found("a*", "x", "f*"))
        self.assertEqual([], self.found("a1", "x", "file", "*"), "no folder")
        self.assertEqual([], self.found("missing", "*"))

    def test_what_fits_comes_in_order(self) -> None:
        names = [f"{digest:08x}" for digest in (number * 2654435761 % 2**32 for number in range(100))]
        for name in names:
            (self.folder / name).touch()
        self.assertEqual(sorted(names), self.found("????????"))

    def test_who_cannot_look_is_told_so(self) -> None:
        with no_more_files():
            self.assertRaises(OSError, self.found, "*")
