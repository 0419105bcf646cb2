"""``caller``: calls to this guest's agent, from a program that has all its modules loaded before the first one.

Each line of input is a JSON list: ``["create", VM, IMAGE, BLOCK]`` makes a disk and reads one block of it,
``["destroy", VM]`` removes it, ``["gc"]`` removes all that nobody needs. Each answer is a JSON object: the seconds that
the call took, and the images that are here after it.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time

from benchmarks.inside.content import BLOCK, block
from virtman.client import AgentClient


def main() -> None:
    """Answer until the input ends."""
    agent = AgentClient()
    agent.vms()
    print("ready", flush=True)
    for line in sys.stdin:
        what, *words = json.loads(line)
        began = time.monotonic()
        if what == "create":
            create(agent, *words)
        elif what == "destroy":
            agent.destroy(*words)
        else:
            agent.gc()
        seconds = time.monotonic() - began
        images = [] if what == "create" else [image.name for image in agent.status().images]
        print(json.dumps({"seconds": seconds, "images": images}), flush=True)


def create(agent: AgentClient, vm: str, image: str, number: int) -> None:
    """Make a disk and read a block of it past the page cache. Raises VirtmanError, OSError, ValueError."""
    disk = agent.create(vm, image).disk.path
    buffer = mmap.mmap(-1, BLOCK)
    fd = os.open(disk, os.O_RDONLY | os.O_DIRECT)
    try:
        os.preadv(fd, [buffer], number * BLOCK)
    finally:
        os.close(fd)
    if buffer[:] != block(number):
        raise ValueError(f"wrong bytes in block {number} of {disk}")


if __name__ == "__main__":
    main()
