"""An agent that notes every step, and is held or killed at one.

    python -m tests.openstack.stepping_agent ORDERS, and the options that lab.cluster gives an agent

In the folder ORDERS, NAME.steps has the steps that the agent NAME has reached, one a line. At the step in NAME.kill it
removes that file and kills itself with SIGKILL; at the one in NAME.hold it waits until that file is gone.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path

from virtman.config import AgentConfig
from virtman.server import serve


def main() -> None:
    """Run the agent of the arguments."""
    parser = argparse.ArgumentParser()
    parser.add_argument("orders", type=Path)
    for option in ("--name", "--volt", "--libvirt", "--stack", "--accel"):
        parser.add_argument(option, required=True)
    for option in ("--state", "--run"):
        parser.add_argument(option, required=True, type=Path)
    options = vars(parser.parse_args())
    orders: Path = options.pop("orders")
    options.pop("stack")  # userspace, as the settings are
    name: str = options["name"]

    def ordered(what: str, reached: str) -> bool:
        file = orders / f"{name}.{what}"
        return file.exists() and file.read_text() == reached

    def step(reached: str) -> None:
        with (orders / f"{name}.steps").open("a") as file:
            file.write(f"{reached}\n")
        if ordered("kill", reached):
            (orders / f"{name}.kill").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        while ordered("hold", reached):
            time.sleep(0.02)

    serve(AgentConfig(**options), step)


if __name__ == "__main__":
    main()
