"""An agent that kills somebody right before it gives a VM's QEMU a certain command.

    python -m tests.boot.killing_agent ORDER, and the options of virtman agent

ORDER is a file with a command of QEMU's and a process id, which is gone when it was carried out. The process is gone as
well when the agent goes on, if it is another one.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from lab.process import kill_and_wait
from virtman import machines
from virtman.cli import main
from virtman.qemu import RunningVm

AGENT = 0
"""In place of a process id: the agent itself."""


class Killing(RunningVm):
    """A running VM whose agent carries out an order."""

    order = Path()

    def execute(self, command: str, arguments: Mapping[str, Any] | None = None) -> Any:
        """Kill, if this is the command of the order, and then execute it."""
        if self.order.exists():
            when, pid = self.order.read_text().split()
            if when == command:
                self.order.unlink()
                _kill(int(pid))
        return super().execute(command, arguments)


def _kill(pid: int) -> None:
    if pid == AGENT:
        os.kill(os.getpid(), signal.SIGKILL)
    kill_and_wait(pid)


if __name__ == "__main__":
    Killing.order = Path(sys.argv[1])
    with mock.patch.object(machines, "RunningVm", Killing):
        main(["agent", *sys.argv[2:]])
