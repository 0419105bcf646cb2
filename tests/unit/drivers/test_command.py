"""Programs that do not end when they should. Those that do: tests/userspace/drivers/test_command.py."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

from testtools import TestCase

from drivers.errors import CommandTimedOut
from drivers.host.command import OnLine, run
from lab.process import attempts
from tests.patience import PATIENCE
from tests.unit.virtman.scene import folder_for

TRACER = """
import ctypes, sys
seize = ctypes.c_long(0x4206)
print(ctypes.CDLL(None).ptrace(seize, int(sys.argv[1]), None, None), flush=True)
sys.stdin.read()
"""
"""Prints 0 once it traces the process, and does so until its input ends."""


class EnoughError(Exception):
    """What a reader of lines raises that wants no more of them."""


class HangingProgramTest(TestCase):
    def run_script(self, script: str, timeout: float, on_line: OnLine | None = None) -> Exception:
        """What the caller of a program gets, who must not wait for it without end."""
        errors: list[Exception] = []

        def call() -> None:
            try:
                run(["sh", "-c", script], timeout=timeout, on_line=on_line)
            except Exception as error:  # noqa: BLE001  the test looks at it
                errors.append(error)

        caller = threading.Thread(target=call, daemon=True)
        caller.start()
        caller.join(PATIENCE / 4)
        self.assertFalse(caller.is_alive(), "its caller waits for it")
        return errors[0]

    def trace(self, pid: int) -> subprocess.Popen[bytes]:
        """Have a process outlive its kill: its parent gets its end only when its tracer has gone (ptrace(2))."""
        argv = [sys.executable, "-c", TRACER, str(pid)]
        tracer = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.addCleanup(tracer.communicate)
        assert tracer.stdout is not None
        if tracer.stdout.readline() != b"0\n":
            self.skipTest("this kernel, or this user, cannot trace processes")
        return tracer

    def test_one_that_outlives_its_kill_is_left_behind_and_reaped_when_it_ends(self) -> None:
        held: list[tuple[Path, subprocess.Popen[bytes]]] = []

        def hold(line: str) -> None:
            held.append((Path("/proc", line), self.trace(int(line))))
            raise EnoughError

        error = self.run_script("echo $$; exec sleep 3600", PATIENCE, hold)
        if not isinstance(error, EnoughError):
            raise error
        [(process, tracer)] = held
        self.assertTrue(process.exists())
        tracer.communicate()
        for _ in attempts(PATIENCE):
            if not process.exists():
                return
        self.fail("nobody reaped it")

    def test_one_whose_child_keeps_its_outputs_open_is_too_slow(self) -> None:
        fifo = folder_for(self) / "fifo"
        os.mkfifo(fifo)
        self.addCleanup(os.close, os.open(fifo, os.O_RDWR))  # until then the child reads
        error = self.run_script(f"exec 3<{fifo}; cat <&3 & exit 0", timeout=0.2)
        self.assertIsInstance(error, CommandTimedOut)
