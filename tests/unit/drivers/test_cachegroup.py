"""Which cache drivers have volumes."""

from __future__ import annotations

import testtools

from drivers.base import CacheGroup
from drivers.registry import load


class CacheGroupTest(testtools.TestCase):
    def test_bcache_has_volumes(self) -> None:
        self.assertTrue(issubclass(load("cache", "bcache"), CacheGroup))

    def test_the_others_have_none(self) -> None:
        for driver in ("qcow2", "dmcache"):
            self.assertFalse(issubclass(load("cache", driver), CacheGroup), driver)
