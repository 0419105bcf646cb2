"""A process that works for a state folder, with a /run and a /dev of its own: the machine's names stay as they are.

What it does to the names themselves: tests/kernel/inside/test_ownership.py.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from testtools import TestCase

APART = (
    "unshare", "--user", "--map-root-user", "--mount",
    "sh", "-c", 'mount -t tmpfs tmpfs /run && mount -t tmpfs tmpfs /dev && exec "$@"', "sh",
)  # fmt: skip
"""Runs what follows with an empty /run and /dev, also for who is not root (unshare(1))."""
CLAIM = """\
import sys
from pathlib import Path
from drivers.kernel import ownership, udevrules
ownership.claim(Path(sys.argv[1]))
print(udevrules.rules())
"""
TIMEOUT = 120


class ClaimTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        if shutil.which("unshare") is None:
            self.skipTest("unshare is missing: it is in Debian's package util-linux")
        tried = subprocess.run([*APART, "true"], capture_output=True, text=True, check=False, timeout=TIMEOUT)
        if tried.returncode:
            self.skipTest(f"this user cannot have a /run and a /dev of its own: {tried.stderr.strip()}")
        self.folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="vm-"))
        self.addCleanup(shutil.rmtree, self.folder)

    def test_udev_will_leave_the_files_of_the_folder_alone(self) -> None:
        argv = [*APART, sys.executable, "-c", CLAIM, str(self.folder)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=TIMEOUT)
        self.assertEqual(0, done.returncode, done.stderr)
        self.assertIn(f"|{self.folder}/*", done.stdout)
