"""Which device a loop device is over, as the kernel tells it."""

from __future__ import annotations

import os

from testtools import TestCase

from drivers.kernel.loopdev import _encoded


class EncodedTest(TestCase):
    def test_a_minor_has_its_lowest_eight_bits_apart_from_the_others(self) -> None:
        for major, minor in ((8, 0), (253, 255), (259, 300), (253, 1 << 12), (7, (1 << 20) - 1)):
            device = os.makedev(major, minor)
            self.assertEqual(device, _encoded(device), "as the C library has it, for what is this small")
