"""The kernel's log where it cannot be read; tests/kernel/inside/test_kernellog.py reads a real one."""

from __future__ import annotations

from pathlib import Path

from testtools import TestCase

from drivers.kernel.kernellog import listening
from tests.unit.logs import Logged


class NoLogTest(TestCase):
    def test_nothing_is_heard_where_there_is_no_log_and_that_is_said(self) -> None:
        heard = Logged(self, "drivers.kernel.kernellog")
        with listening(Path("/dev/no/kmsg")) as said:
            self.assertEqual([], said())
        self.assertIn("the kernel's log cannot be read", " ".join(heard.lines))
