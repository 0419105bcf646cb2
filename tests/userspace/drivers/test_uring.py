"""Caches that a storage daemon reads by io_uring, and machines that do not let it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from drivers.cache.qcow2 import Qcow2Cache
from tests.userspace.drivers.hosts import HostCase

WITHOUT_IO_URING = """
import ctypes, struct, sys
call, denied, allowed = 425, 0x00050001, 0x7FFF0000  # io_uring_setup, EPERM (linux/seccomp.h)
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, call), (0x06, 0, 0, denied), (0x06, 0, 0, allowed)]  # linux/filter.h
program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
filter = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(steps), ctypes.addressof(program)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0, "no new privileges"
assert libc.prctl(22, 2, filter, 0, 0) == 0, "seccomp"
from drivers.qemu import uring
print(uring.usable())
"""
"""A process that its service manager keeps from io_uring (systemd.exec(5), SystemCallFilter)."""


WITHOUT_QEMU = """
import os
from drivers.qemu import uring
path, os.environ["PATH"] = os.environ["PATH"], "/nowhere"
print(uring.usable())
os.environ["PATH"] = path
print(uring.usable())
"""


class UringTest(HostCase):
    def test_machine_that_refuses_it_goes_without(self) -> None:
        said = subprocess.run([sys.executable, "-c", WITHOUT_IO_URING], capture_output=True, text=True, check=True)
        self.assertEqual("False\n", said.stdout)

    def test_cache_uses_it_where_it_works(self) -> None:
        image, _, (_, host) = self.chain(1)
        self.assertEqual(self.works(), any('"aio": "io_uring"' in argument for argument in host.daemon(image).argv))

    def works(self) -> bool:
        """Whether QEMU reads a file by it here: asked of another of its programs than the drivers ask."""
        argv = ["qemu-io", "-r", "-f", "raw", "-i", "io_uring", "-c", "read 0 512", __file__]
        return subprocess.run(argv, capture_output=True, check=False).returncode == 0

    def test_cache_that_was_filled_by_it_is_read_without_it(self) -> None:
        image, file, (origin, host) = self.chain(1)
        self.assert_same(host.uri(image), file)
        host.cache = Qcow2Cache(host.place, io_uring=False)
        host.join(image, [origin])
        origin.export.withdraw(image.name)
        self.assert_same(host.uri(image), file)

    def test_a_machine_whose_qemu_was_away_is_asked_again(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            qemu_img = Path(folder, "qemu-img")
            qemu_img.write_text("#!/bin/sh\n")  # opens everything
            qemu_img.chmod(0o755)
            said = subprocess.check_output([sys.executable, "-c", WITHOUT_QEMU], env={"PATH": folder}, text=True)
        self.assertEqual("False\nTrue\n", said)
