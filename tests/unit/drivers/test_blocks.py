"""Disks that are read and written by their path."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from testtools import TestCase

from drivers.base import Device
from drivers.blocks import open_blocks
from drivers.errors import BadDevice
from tests.unit.virtman.scene import folder_for

SECTOR, MIB = 512, 1 << 20
SIZE = 3 * MIB


class BlocksTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.path = folder_for(self) / "disk"
        self.path.write_bytes(b"x" * SIZE)
        self.device = Device(SIZE, self.path)

    def test_what_is_written_is_read(self) -> None:
        with open_blocks("vm", self.device, write=True) as blocks:
            blocks.write(SECTOR, b"y" * MIB)
            blocks.zero(2 * MIB, MIB - SECTOR)
            self.assertEqual(b"x" * SECTOR + b"y" * SECTOR, blocks.read(0, 2 * SECTOR))
            blocks.flush()
        expected = b"x" * SECTOR + b"y" * MIB + b"x" * (MIB - SECTOR) + bytes(MIB - SECTOR) + b"x" * SECTOR
        self.assertEqual(expected, self.path.read_bytes())

    def test_what_cannot_be_made_durable_is_told_of_in_the_end(self) -> None:
        os.mkfifo(pipe := self.path.with_name("pipe"))  # fsync(2) refuses pipes
        opened = open_blocks("vm", Device(SIZE, pipe), write=True)
        opened.__enter__()
        self.assertEqual(errno.EINVAL, self.assertRaises(OSError, opened.__exit__, None, None, None).errno)

    def test_zeros_are_written_where_there_are_none_only(self) -> None:
        with self.path.open("wb") as file:
            file.truncate(SIZE)
            file.seek(2 * MIB)
            file.write(b"x")
        with open_blocks("vm", self.device, write=True) as blocks:
            blocks.zero(0, SIZE)
        self.assertEqual(bytes(SIZE), self.path.read_bytes())
        self.assertLessEqual(self.path.stat().st_blocks * SECTOR, MIB)

    def test_a_disk_that_ends_early_is_told(self) -> None:
        with open_blocks("vm", self.device) as blocks:
            self.assertRaises(OSError, blocks.read, SIZE - SECTOR, 2 * SECTOR)

    def test_one_that_is_only_read_is_not_written(self) -> None:
        with open_blocks("vm", self.device) as blocks:
            self.assertRaises(OSError, blocks.write, 0, b"y")
        self.assertEqual(b"x" * SIZE, self.path.read_bytes())

    def test_what_cannot_be_opened(self) -> None:
        self.assertRaises(BadDevice, open_blocks("vm", Device(SIZE)).__enter__)
        self.assertRaises(OSError, open_blocks("vm", Device(SIZE, Path("/nothing"))).__enter__)
