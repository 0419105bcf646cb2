"""``vms create IMAGE VM...`` makes disks; ``vms forget VM...`` removes them and all that this guest has of images.

The output is a JSON list of the paths of the disks.
"""

from __future__ import annotations

import json
import sys
import time

from virtman.client import AgentClient

_PATIENCE, _PAUSE = 120.0, 0.5


def create(agent: AgentClient, image: str, vms: list[str]) -> list[str]:
    """Make disks, one after the other."""
    return [agent.create(vm, image).disk.path for vm in vms]


def forget(agent: AgentClient, vms: list[str]) -> list[str]:
    """Remove disks, and all that nobody needs. Raises TimeoutError."""
    for vm in vms:
        agent.destroy(vm)
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        agent.gc()
        if not agent.status().images:
            return []
        time.sleep(_PAUSE)
    raise TimeoutError(f"an image is still here after {_PATIENCE:.0f} s")


def main(what: str, *words: str) -> None:
    """Do it."""
    agent = AgentClient()
    disks = create(agent, words[0], list(words[1:])) if what == "create" else forget(agent, list(words))
    print(json.dumps(disks))


if __name__ == "__main__":
    main(*sys.argv[1:])
