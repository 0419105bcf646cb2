"""Which names and paths are let in."""

from __future__ import annotations

from pathlib import Path

from testtools import TestCase
from testtools.matchers import HasLength, LessThan

from virtman.errors import BadRequest
from virtman.names import check_name, check_path

BAD = ["", ".", "..", "a.b", "a/b", "-a", "_a", "a b", "a\n", "\na", "a\0", "é", "٣", "a" * 64, "a" * 300, "--help"]


class NamesTest(TestCase):
    def test_letters_digits_hyphens_and_underscores_are_allowed(self) -> None:
        for name in ("a", "0", "web-1", "Web_2", "a" * 63, "a-", "1_"):
            self.assertEqual(name, check_name("vm", name))

    def test_everything_else_is_refused_by_name(self) -> None:
        for name in BAD:
            error = self.assertRaises(BadRequest, check_name, "vm", name)
            self.assertIn("vm name", str(error))

    def test_refusal_of_a_long_name_stays_short(self) -> None:
        error = self.assertRaises(BadRequest, check_name, "vm", "a" * 300)
        self.assertThat(len(str(error)), LessThan(250))


class PathsTest(TestCase):
    def test_absolute_paths_of_one_line_are_allowed(self) -> None:
        for path in ("/a", "/a b", "/dev/disk/by-id/x:0-part1", "/ä/[b]", "/a/../b"):
            self.assertEqual(path, check_path(Path(path)))

    def test_everything_else_is_refused_in_one_line(self) -> None:
        for path in ("", "a", "./a", "/", "//a", "/a\0", "/a\n", "/a\nb", "/\r", "/\x7f", "/\udcff"):
            error = self.assertRaises(BadRequest, check_path, Path(path))
            self.assertThat(str(error).encode().splitlines(), HasLength(1))

    def test_refusal_of_a_long_path_stays_short(self) -> None:
        error = self.assertRaises(BadRequest, check_path, Path("a" * 300))
        self.assertThat(len(str(error)), LessThan(250))
