"""An image source of three layers. What the agent asks of it: tests/unit/virtman/test_stacks.py."""

from __future__ import annotations

import os
from unittest import mock

from testtools import TestCase

from drivers.base import Device, Image, Range
from drivers.layered import PIECE, LayeredSource
from tests.unit.virtman.scene import folder_for

IMAGE = Image("debian", 4 * PIECE, "sha256:00")


class FillTest(TestCase):
    def test_the_ranges_are_read_as_children_would_and_nothing_else_is(self) -> None:
        disk = folder_for(self) / "disk"
        disk.write_bytes(bytes(IMAGE.size))
        export = mock.Mock()
        export.local.return_value = Device(IMAGE.size, disk)
        read: list[tuple[int, int]] = []

        def pread(fd: int, length: int, offset: int) -> bytes:
            read.append((offset, length))
            return real(fd, length, offset)

        real = os.pread
        self.patch(os, "pread", pread)
        LayeredSource(mock.Mock(), mock.Mock(), export).fill(IMAGE, [Range(0, 512), Range(PIECE, PIECE + 512)])
        self.assertEqual([(0, 512), (PIECE, PIECE), (2 * PIECE, 512)], read)
