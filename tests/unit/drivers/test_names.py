"""Names at the door."""

from __future__ import annotations

from pathlib import Path

import testtools
from hypothesis import given
from hypothesis import strategies as st

from drivers.errors import BadName, DriverError
from drivers.names import checked, fitting


class NameTest(testtools.TestCase):
    def test_plain_names_pass(self) -> None:
        for name in ("a", "debian-12", "A_b-9", "x" * 63):
            self.assertEqual(name, checked(name))

    def test_names_that_could_do_harm_are_refused(self) -> None:
        for name in ("", ".", "..", "a/b", "a.b", "-a", "_a", "a b", "a\n", "a\0", "ä", "٣", "x" * 64, "x" * 300):
            self.assertRaises(BadName, checked, name)

    @given(st.text())
    def test_whatever_passes_is_a_plain_file_name(self, name: str) -> None:
        try:
            checked(name)
        except BadName:
            return
        self.assertEqual(name, Path("/folder", name).name)
        self.assertTrue(name.isascii())

    def test_error_shows_little_of_an_endless_name(self) -> None:
        self.assertLess(len(str(BadName("x" * 100_000))), 300)


class PathTest(testtools.TestCase):
    def test_path_of_a_socket_has_a_limit(self) -> None:
        self.assertEqual(Path("/" + "x" * 106), fitting(Path("/" + "x" * 106)))
        self.assertRaises(DriverError, fitting, Path("/" + "x" * 107))
        self.assertRaises(DriverError, fitting, Path("/" + "ä" * 54))
