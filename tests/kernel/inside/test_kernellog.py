"""What the kernel says is heard, also when it says more than its log holds."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from testtools import TestCase

from drivers.kernel.kernellog import listening

LOG = Path("/dev/kmsg")
LIMIT = Path("/proc/sys/kernel/printk_devkmsg")
"""How fast programs may write to the log (Linux: admin-guide/sysctl/kernel)."""


def say(lines: Iterable[str]) -> None:
    """Each is a line of the log, as if the kernel said it."""
    with LOG.open("w", buffering=1) as log:
        for line in lines:
            log.write(f"{line}\n")


class ListeningTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.addCleanup(LIMIT.write_text, LIMIT.read_text())
        LIMIT.write_text("on\n")

    def test_what_is_said_meanwhile_is_heard_once_and_nothing_from_before(self) -> None:
        say(["virtman test: before"])
        with listening() as said:
            self.assertNotIn("virtman test: before", said())
            say(["virtman test: one", "virtman test: two"])
            heard = [line for line in said() if line.startswith("virtman test")]
            self.assertEqual(["virtman test: one", "virtman test: two"], heard)
            self.assertEqual([], [line for line in said() if line.startswith("virtman test")])

    def test_what_has_been_overwritten_is_passed_by(self) -> None:
        with listening() as said:
            say(f"virtman test: {number} {'.' * 900}" for number in range(2000))
            heard = [line for line in said() if line.startswith("virtman test")]
        self.assertNotIn("virtman test: 0 ", heard[0])
        self.assertIn("virtman test: 1999 ", heard[-1])
