"""Drivers by name."""

from __future__ import annotations

import sys

import testtools

from drivers.cache.dmcache import DmCache
from drivers.errors import UnknownDriver
from drivers.registry import load
from tests.unit.virtman.scene import folder_for


class RegistryTest(testtools.TestCase):
    """With a package of somebody else that brings a cache driver."""

    def setUp(self) -> None:
        super().setUp()
        folder = folder_for(self)
        package = folder / "theirs-1.0.dist-info"
        package.mkdir()
        (package / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
        points = "[virtman.drivers.cache]\ntheirs = drivers.cache.dmcache:DmCache\n"
        (package / "entry_points.txt").write_text(points)
        sys.path.append(str(folder))
        self.addCleanup(sys.path.remove, str(folder))

    def test_driver_of_another_package_is_loaded(self) -> None:
        self.assertIs(DmCache, load("cache", "theirs"))

    def test_unknown_driver_is_told_with_the_known_ones(self) -> None:
        error = self.assertRaises(UnknownDriver, load, "cache", "nothing")
        self.assertIn("theirs", str(error))

    def test_unknown_layer_has_no_drivers(self) -> None:
        self.assertRaises(UnknownDriver, load, "nothing", "qcow2")
