"""Programs that the kernel does not let go."""

from __future__ import annotations

from pathlib import Path

from testtools import TestCase

from drivers.errors import CommandTimedOut
from drivers.host.command import run
from tests.kernel.inside.filesystems import small_file_system
from tests.kernel.inside.folders import state_folder
from tests.patience import wait_until


def children() -> list[str]:
    """The processes that this one has to reap (proc(5))."""
    return Path("/proc/thread-self/children").read_text().split()


class HangingProgramTest(TestCase):
    """A program that writes to a file system that takes no writes now."""

    def test_a_program_that_outlives_its_kill_is_left_behind_and_reaped_when_it_ends(self) -> None:
        folder = small_file_system(self, state_folder(self), "16M")
        run(["fsfreeze", "--freeze", str(folder)])
        thaw = ["fsfreeze", "--unfreeze", str(folder)]
        try:
            self.assertRaises(CommandTimedOut, run, ["touch", str(folder / "file")], timeout=1)
            self.assertEqual(1, len(children()))
        finally:
            run(thaw)
        wait_until(lambda: not children())
