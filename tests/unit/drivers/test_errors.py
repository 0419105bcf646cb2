"""The exception tree of the drivers."""

from __future__ import annotations

import re

import testtools

from drivers import errors
from drivers.errors import CommandFailed, DaemonFailed, DriverError, UnknownDriver


class TreeTest(testtools.TestCase):
    def test_drawn_tree_names_every_class(self) -> None:
        drawn = set(re.findall(r"[├└]── (\w+)", errors.__doc__ or ""))
        there = {
            name
            for name, kind in vars(errors).items()
            if isinstance(kind, type) and issubclass(kind, DriverError) and kind is not DriverError
        }
        self.assertEqual(there, drawn)


class MessageTest(testtools.TestCase):
    def test_failed_command_tells_the_last_line_of_its_complaint(self) -> None:
        error = CommandFailed(["tool", "x"], 2, "output", "first\nlast\n")
        self.assertEqual("tool x ended with exit code 2: last", str(error))

    def test_failed_command_without_a_complaint_tells_its_output(self) -> None:
        self.assertIn("output", str(CommandFailed(["tool"], 2, "output\n", "")))
        self.assertIn("said nothing", str(CommandFailed(["tool"], 2, "", " ")))

    def test_unknown_driver_lists_what_there_is(self) -> None:
        self.assertIn("installed: a, b", str(UnknownDriver("cache", "x", ["b", "a"])))
        self.assertIn("none at all", str(UnknownDriver("cache", "x", [])))

    def test_failed_daemon_shows_its_log(self) -> None:
        self.assertIn("last words", str(DaemonFailed("img", "ended", "last words")))
        self.assertIn("log is empty", str(DaemonFailed("img", "ended", "")))
