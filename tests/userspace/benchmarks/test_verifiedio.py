"""Verified I/O on a real disk, whose backing file is tampered with to see that it is noticed."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

from testtools import TestCase

from benchmarks.disks import exported, local_disks
from benchmarks.verifiedio import BLOCK, VerifiedIo, wrong_blocks
from tests.programs import require

BLOCKS = 64
ENOUGH_REQUESTS = 150
LIMIT_S = 180.0


class VerifiedIoTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        require(self, "qemu-storage-daemon", "qemu-img")
        folder = tempfile.TemporaryDirectory(dir="/tmp")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.image = self.folder / "image"
        self.image.write_bytes(os.urandom(BLOCKS * BLOCK))
        self.served = self.folder / "served"
        shutil.copy(self.image, self.served)
        self.written: dict[int, bytes] = {}

    def exercise(self) -> tuple[VerifiedIo, list[int]]:
        """The I/O after it has visited every block, and the blocks found wrong in the whole disk after it."""
        with exported(self.folder, local_disks(self.folder, self.served, {"host": ["vm"]})) as sockets:
            io = VerifiedIo(sockets["host"], "vm", self.image, self.written, list(range(BLOCKS)))
            with io:
                end = time.monotonic() + LIMIT_S
                while len(io.requests) < ENOUGH_REQUESTS and not io.errors and time.monotonic() < end:
                    time.sleep(0.01)
            return io, wrong_blocks(sockets["host"], "vm", self.image, self.written)

    def test_one_other_byte_is_noticed_and_nothing_else(self) -> None:
        io, wrong = self.exercise()
        self.assertEqual(([], [], []), (io.errors, io.wrong, wrong))
        self.assertNotEqual({}, self.written)
        self.assertGreater(io.compared_bytes, BLOCKS * BLOCK)
        shutil.copy(self.image, self.served)
        self.written.clear()
        with self.served.open("r+b") as file:
            file.seek(5 * BLOCK + 9000)
            byte = file.read(1)
            file.seek(5 * BLOCK + 9000)
            file.write(bytes([byte[0] ^ 1]))
        io, wrong = self.exercise()
        self.assertEqual({5}, set(io.wrong))
        # A block that was visited and written is expected as it must be, not as it was found.
        self.assertEqual([5], wrong)
