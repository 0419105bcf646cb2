"""Programs run by the drivers."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import testtools

from drivers.errors import CommandFailed, CommandTimedOut, ToolMissing
from drivers.host.command import run, tool
from tests.patience import PATIENCE, wait_until
from tests.programs import is_running

TRANSLATED = """
from drivers.host.command import run
print(run(["bash", "-c", 'echo $"File exists" in $LC_ALL']).stdout.strip())
"""


def catalog(message: bytes, translated: bytes) -> bytes:
    """A translation as gettext reads it (its manual, "The Format of GNU MO Files")."""
    at = 44
    header = [0x950412DE, 0, 1, 28, 36, 0, at, len(message), at, len(translated), at + len(message) + 1]
    return struct.pack("=11I", *header) + message + b"\0" + translated + b"\0"


class CommandTest(testtools.TestCase):
    def test_messages_are_not_translated_on_a_host_that_speaks_another_language(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            messages = Path(folder, "de", "LC_MESSAGES")
            messages.mkdir(parents=True)
            (messages / "test.mo").write_bytes(catalog(b"File exists", b"Die Datei existiert bereits"))
            german = {"LC_ALL": "de_DE.UTF-8", "LANGUAGE": "de", "TEXTDOMAIN": "test", "TEXTDOMAINDIR": folder}
            said = subprocess.check_output([sys.executable, "-c", TRANSLATED], env={**os.environ, **german}, text=True)
        self.assertEqual("File exists in C.UTF-8\n", said)

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
        script = "echo $$; sleep 3600 & echo $!; sleep 3600"
        error = self.assertRaises(CommandTimedOut, run, ["sh", "-c", script], timeout=5)
        self.assertEqual(2, len(error.stdout.split()))
        wait_until(lambda: not any(is_running(int(pid)) for pid in error.stdout.split()))

    def test_program_that_closes_its_outputs_and_stays_is_killed(self) -> None:
        self.assertRaises(CommandTimedOut, run, ["sh", "-c", "exec >&- 2>&-; sleep 3600"], timeout=0.2)

    def test_lines_are_told_as_they_come(self) -> None:
        lines: list[str] = []
        output = run(["sh", "-c", r"printf '(1/100%%)\r(2/100%%)\r\nthree\n\nlast'"], on_line=lines.append)
        self.assertEqual(["(1/100%)", "(2/100%)", "three", "last"], lines)
        self.assertEqual("", output.stdout)

    def test_failing_reader_ends_the_program(self) -> None:
        def fail(_: str) -> None:
            raise RuntimeError("enough")

        self.assertRaises(RuntimeError, run, ["sh", "-c", "echo one; sleep 3600"], on_line=fail)

    def test_program_gets_no_input(self) -> None:
        self.assertEqual("", run(["cat"]).stdout)

    def test_descriptors_are_not_inherited(self) -> None:
        secret = os.open(os.devnull, os.O_RDONLY)
        self.addCleanup(os.close, secret)
        self.assertNotIn(f"{secret}\n", run(["sh", "-c", f"[ -e /proc/$$/fd/{secret} ] && echo {secret}; true"]).stdout)

    def test_one_whose_child_keeps_its_outputs_open_is_too_slow(self) -> None:
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as pool:
            fifo = Path(folder, "fifo")
            os.mkfifo(fifo)
            held = os.open(fifo, os.O_RDWR)  # until it is closed the child reads
            try:
                caller = pool.submit(run, ["sh", "-c", f"exec 3<{fifo}; cat <&3 & exit 0"], timeout=0.2)
                self.assertIsInstance(caller.exception(PATIENCE / 4), CommandTimedOut)
            finally:
                os.close(held)
