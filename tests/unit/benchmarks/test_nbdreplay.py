"""The replay's own logic."""

from __future__ import annotations

import errno
import struct
from pathlib import Path

from testtools import ExpectedException, TestCase

from benchmarks.errors import DiskFailed
from benchmarks.nbdreplay import Disk, check_reply, shared_out


class SharesTest(TestCase):
    def test_the_disks_of_a_host_stay_together(self) -> None:
        disks = [Disk(f"{host}-{vm}", host, Path("/s")) for host in "abc" for vm in range(2)]
        shares = shared_out(disks, 2)
        self.assertEqual([["a", "a", "c", "c"], ["b", "b"]], [[disk.host for disk in share] for share in shares])

    def test_no_share_is_empty(self) -> None:
        self.assertEqual(1, len(shared_out([Disk("vm", "a", Path("/s"))], 4)))


class ReplyTest(TestCase):
    def test_an_error_in_a_reply_is_named(self) -> None:
        with ExpectedException(DiskFailed, "disk: Input/output error"):
            check_reply(struct.pack(">IIQ", 0x67446698, errno.EIO, 7), 7, "disk")

    def test_a_reply_to_another_request_is_an_error(self) -> None:
        with ExpectedException(DiskFailed, "disk: not a reply.*"):
            check_reply(struct.pack(">IIQ", 0x67446698, 0, 8), 7, "disk")
