"""Programs that do not end when they should. Those that do: tests/userspace/drivers/test_command.py."""

from __future__ import annotations

import os
import threading

from testtools import TestCase

from drivers.errors import CommandTimedOut
from drivers.host.command import OnLine, run
from tests.patience import PATIENCE
from tests.unit.virtman.scene import folder_for


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

    def test_one_whose_child_keeps_its_outputs_open_is_too_slow(self) -> None:
        fifo = folder_for(self) / "fifo"
        os.mkfifo(fifo)
        self.addCleanup(os.close, os.open(fifo, os.O_RDWR))  # until then the child reads
        error = self.run_script(f"exec 3<{fifo}; cat <&3 & exit 0", timeout=0.2)
        self.assertIsInstance(error, CommandTimedOut)
