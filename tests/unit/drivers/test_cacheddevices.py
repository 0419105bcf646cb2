"""How tables of devices are made that are read through the cache."""

from __future__ import annotations

from testtools import TestCase

from drivers.cache.cacheddevices import _multipath, _whole

MIB = 2048
"""Sectors."""


class WholeTest(TestCase):
    def test_it_is_one_target_of_the_largest_chunk_that_fits(self) -> None:
        for sectors, chunk in (
            (1024 * MIB, 1024 * MIB), (10 * 1024 * MIB, 1024 * MIB), (1536 * MIB, 512 * MIB), (3 * MIB, MIB),
        ):  # fmt: skip
            self.assertEqual(f"striped 1 {chunk} 8:16 0", _whole("8:16", sectors))
            self.assertEqual(0, sectors % chunk)

    def test_a_size_without_such_a_chunk_is_linear(self) -> None:
        for sectors in (MIB // 2, 5 * MIB + 8, 1024 * MIB + 1):
            self.assertEqual("linear 8:16 0", _whole("8:16", sectors))


class MultipathTest(TestCase):
    def test_it_prefers_the_first_and_holds_what_none_takes(self) -> None:
        self.assertEqual(
            "0 8 multipath 3 queue_if_no_path queue_mode bio 0 2 1 round-robin 0 1 0 253:1 round-robin 0 1 0 253:0",
            _multipath(8, "253:1", "253:0"),
        )
