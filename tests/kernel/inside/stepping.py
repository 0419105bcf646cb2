"""``stepping.py STEP``: the agent of a guest's service, which kills itself with SIGKILL when it reaches a step."""

from __future__ import annotations

import os
import signal
import socket
import sys
from dataclasses import asdict
from pathlib import Path

from virtman.config import AgentConfig
from virtman.server import serve
from virtman.stackchoice import KERNEL


def main(fatal: str) -> None:
    """Run the agent with the settings of the service (lab.kernel.services)."""

    def step(reached: str) -> None:
        if reached == fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    config = AgentConfig(
        name=socket.gethostname(),
        state=Path("/var/lib/virtman"),
        run=Path("/run/virtman"),
        volt=os.environ["VIRTMAN_VOLT"],
        volt_token_file=Path(os.environ["VIRTMAN_VOLT_TOKEN_FILE"]),
        accel=os.environ["VIRTMAN_ACCEL"],
        address=os.environ["VIRTMAN_ADDRESS"],
        **asdict(KERNEL),
    )
    serve(config, step)


if __name__ == "__main__":
    main(*sys.argv[1:])
