"""The exception tree of the drivers."""

from __future__ import annotations

import re

import testtools

from drivers import errors
from drivers.errors import CommandFailed, DriverError


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
    def test_failed_command_tells_its_task_and_the_last_line_of_its_complaint(self) -> None:
        for argv in (["tool", "x", "-o", "y"], ["setpriv", "--pdeathsig", "KILL", "tool", "x", "/file"]):
            error = CommandFailed(argv, 2, "output", "first\nlast\n")
            self.assertEqual("tool x ended with exit code 2: last", str(error))
