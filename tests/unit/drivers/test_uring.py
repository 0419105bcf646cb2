"""Machines that cannot answer whether io_uring works."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from testtools import TestCase

WITHOUT_QEMU = """
import os
from drivers.qemu import uring
path, os.environ["PATH"] = os.environ["PATH"], "/nowhere"
print(uring.usable())
os.environ["PATH"] = path
print(uring.usable())
"""


class UringTest(TestCase):
    def test_a_machine_whose_qemu_was_away_is_asked_again(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            qemu_img = Path(folder, "qemu-img")
            qemu_img.write_text("#!/bin/sh\n")  # opens everything
            qemu_img.chmod(0o755)
            said = subprocess.check_output([sys.executable, "-c", WITHOUT_QEMU], env={"PATH": folder}, text=True)
        self.assertEqual("False\nTrue\n", said)
