"""Programs run by the drivers."""

from __future__ import annotations

import os
import time

import testtools

from drivers.command import run, tool
from drivers.errors import CommandFailed, CommandTimedOut, ToolMissing


class CommandTest(testtools.TestCase):
    def test_both_outputs_are_captured(self) -> None:
        output = run(["sh", "-c", "echo out; echo err >&2"])
        self.assertEqual(("out\n", "err\n"), (output.stdout, output.stderr))

    def test_large_outputs_do_not_block(self) -> None:
        output = run(["sh", "-c", "head -c 1000000 /dev/zero >&2; head -c 1000000 /dev/zero"])
        self.assertEqual((1_000_000, 1_000_000), (len(output.stdout), len(output.stderr)))

    def test_failure_carries_everything(self) -> None:
        error = self.assertRaises(CommandFailed, run, ["sh", "-c", "echo out; echo err >&2; exit 3"])
        self.assertEqual((3, "out\n", "err\n"), (error.code, error.stdout, error.stderr))
        self.assertEqual("sh", error.argv[0])

    def test_missing_tool_is_named(self) -> None:
        self.assertRaises(ToolMissing, tool, "no-such-tool")
        error = self.assertRaises(ToolMissing, run, ["no-such-tool"])
        self.assertEqual("no-such-tool", error.tool)

    def test_slow_program_is_killed_with_its_children(self) -> None:
        begin = time.monotonic()
        error = self.assertRaises(CommandTimedOut, run, ["sh", "-c", "echo out; sleep 60 & sleep 60"], timeout=0.2)
        self.assertLess(time.monotonic() - begin, 5)
        self.assertEqual("out\n", error.stdout)

    def test_program_that_closes_its_outputs_and_stays_is_killed(self) -> None:
        self.assertRaises(CommandTimedOut, run, ["sh", "-c", "exec >&- 2>&-; sleep 60"], timeout=0.2)

    def test_lines_are_told_as_they_come(self) -> None:
        lines: list[str] = []
        run(["sh", "-c", r"printf '(1/100%%)\r(2/100%%)\r\nthree\n\nlast'"], on_line=lines.append)
        self.assertEqual(["(1/100%)", "(2/100%)", "three", "last"], lines)

    def test_failing_reader_ends_the_program(self) -> None:
        def fail(_: str) -> None:
            raise RuntimeError("enough")

        begin = time.monotonic()
        self.assertRaises(RuntimeError, run, ["sh", "-c", "echo one; sleep 60"], on_line=fail)
        self.assertLess(time.monotonic() - begin, 5)

    def test_program_gets_no_input(self) -> None:
        self.assertEqual("", run(["cat"]).stdout)

    def test_descriptors_are_not_inherited(self) -> None:
        secret = os.open(os.devnull, os.O_RDONLY)
        self.addCleanup(os.close, secret)
        self.assertNotIn(f"{secret}\n", run(["sh", "-c", f"[ -e /proc/$$/fd/{secret} ] && echo {secret}; true"]).stdout)
