"""An agent that notes every step it reaches in a file, and kills itself with SIGKILL at one of them.

python -m tests.userspace.stepping_agent NAME STATE RUN VOLT_URL NOTES [STEP]
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

from virtman.config import AgentConfig
from virtman.server import serve


def main() -> None:
    """Run the agent of the arguments."""
    name, state, run, volt, notes, *fatal = sys.argv[1:]

    def step(reached: str) -> None:
        with Path(notes).open("a") as file:
            file.write(f"{reached}\n")
        if reached in fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    group, location = os.environ.get("VIRTMAN_GROUP"), os.environ.get("VIRTMAN_PLACE", "")
    limit = int(os.environ.get("VIRTMAN_CACHE_LIMIT", "0")) or None
    config = AgentConfig(name, Path(state), Path(run), volt, accel="tcg", group=group, location=location)
    serve(replace(config, cache_limit=limit), step)


if __name__ == "__main__":
    main()
