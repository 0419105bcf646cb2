"""``child.py IMAGE once|until-lost|until-stopped POLICY HOST=IP...``: read an image from these parents, in a guest.

``until-lost``: until the file STRUCK is there, and one of them is lost and was told of; ``until-stopped``: until the
file STOP is there and all are usable; and once more.

Every byte read is compared. The last line of the output is a JSON object with what happened.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import mmap
import os
import queue
import socket
import sys
import threading
from pathlib import Path

from drivers.attach.iscsi import IscsiAttach
from drivers.base import Image, Parent, PathState, Place
from tests.kernel.inside.iscsi_tools import SECRET
from tests.kernel.inside.parent import SIZE, content, image

READY = Path("/run/child-reads")
"""Is there while it reads with all parents usable."""

STOP, STRUCK = Path("/run/child-stop"), Path("/run/child-struck")

TOLD = (" does not answer reads, and ", " lost")
"""What is told of the driver's log."""

CHUNK = 64 << 10
FOLDER = Path("/run/child")


def main(name: str, until: str, policy: str, *parents: str) -> None:
    """Connect, read, disconnect, and say how it went."""
    lost: list[str] = []
    said: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    logging.getLogger("drivers").addHandler(logging.handlers.QueueHandler(said))

    def note(_image: Image, parent: Parent) -> None:
        if until != "until-lost" or STRUCK.exists():
            lost.append(parent.host)

    attach = IscsiAttach(Place(FOLDER, FOLDER, host=socket.gethostname(), path_policy=policy), lost=note)
    listed = [Parent(host, f"iscsi://{ip}:3260", SECRET) for host, _, ip in (word.partition("=") for word in parents)]
    path = attach.connect(image(name), listed).path
    assert path is not None
    try:
        read(path, content(name))
        wait_for_all(attach, name)
        READY.touch()
        before = fetched()
        while (until == "until-lost" and not (lost and lost_since_struck(attach, name))) or (
            until == "until-stopped" and not STOP.exists()
        ):
            read(path, content(name))
        if until == "until-stopped":
            wait_for_all(attach, name)
        read(path, content(name))
        states = [f"{status.parent.host} {status.state}" for status in attach.paths(name)]
        shares = [count - before[disk] for disk, count in fetched().items() if disk in before]
    finally:
        for file in (READY, STOP, STRUCK):
            file.unlink(missing_ok=True)
        attach.disconnect(name)
    messages = [said.get() for _ in range(said.qsize())]
    why = [(each.created, each.msg) for each in messages if any(part in each.msg for part in TOLD)]
    print(json.dumps({"lost": lost, "why": why, "paths": states, "shares": shares}))  # noqa: T201


def fetched() -> dict[str, int]:
    """Sectors read from each iSCSI disk."""
    return {file.parent.name: int(file.read_text().split()[2]) for file in Path("/sys/block").glob("sd*/stat")}


def lost_since_struck(attach: IscsiAttach, name: str) -> bool:
    """Whether a parent is lost; before the test did something to one, a slow machine may have been why."""
    return STRUCK.exists() and any(status.state is PathState.LOST for status in attach.paths(name))


def wait_for_all(attach: IscsiAttach, name: str) -> None:
    """Wait until every parent is usable."""
    waiting = threading.Event()
    while any(status.state is PathState.LOST for status in attach.paths(name)):
        waiting.wait(0.05)


def read(path: Path, wanted: bytes) -> None:
    """A whole pass past the page cache."""
    buffer = mmap.mmap(-1, CHUNK)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        for offset in range(0, SIZE, CHUNK):
            os.preadv(fd, [buffer], offset)
            if buffer[:] != wanted[offset : offset + CHUNK]:
                raise AssertionError(f"wrong bytes at {offset}")
    finally:
        os.close(fd)


if __name__ == "__main__":
    main(*sys.argv[1:])
