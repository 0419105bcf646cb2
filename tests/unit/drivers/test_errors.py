"""The exception tree of the drivers."""

from __future__ import annotations

import re

import testtools

from drivers import errors
from drivers.errors import DriverError


class TreeTest(testtools.TestCase):
    def test_drawn_tree_names_every_class(self) -> None:
        drawn = set(re.findall(r"[├└]── (\w+)", errors.__doc__ or ""))
        there = {
            name
            for name, kind in vars(errors).items()
            if isinstance(kind, type) and issubclass(kind, DriverError) and kind is not DriverError
        }
        self.assertEqual(there, drawn)
