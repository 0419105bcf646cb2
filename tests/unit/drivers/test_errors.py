"""What errors of drivers say."""

from __future__ import annotations

import testtools

from drivers.errors import CommandFailed


class MessageTest(testtools.TestCase):
    def test_failed_command_tells_its_task_and_the_last_line_of_its_complaint(self) -> None:
        for argv in (["tool", "x", "-o", "y"], ["setpriv", "--pdeathsig", "KILL", "tool", "x", "/file"]):
            error = CommandFailed(argv, 2, "output", "first\nlast\n")
            self.assertEqual("tool x ended with exit code 2: last", str(error))
