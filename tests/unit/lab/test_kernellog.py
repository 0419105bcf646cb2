"""What counts as trouble in a kernel log."""

from __future__ import annotations

from testtools import TestCase

from lab.kernel.kernellog import troubles


class TroublesTest(TestCase):
    def test_each_kind_is_found(self) -> None:
        lines = [
            "BUG: kernel NULL pointer dereference, address: 0000000000000008",
            "INFO: task dd:1234 blocked for more than 120 seconds.",
            "WARNING: possible circular locking dependency detected",
            "blk_update_request: I/O error, dev sda, sector 0 op 0x0:(READ)",
            "Buffer I/O error on dev dm-0, logical block 0, async page read",
            "WARNING: CPU: 0 PID: 1 at fs/buffer.c:1",
        ]
        self.assertEqual(lines, troubles("\n".join(lines)))

    def test_ordinary_lines_are_not(self) -> None:
        self.assertEqual(
            [], troubles("loop0: detected capacity change from 0 to 8\nbcache: register_bdev() registered")
        )
