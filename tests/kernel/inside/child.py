"""``child.py IMAGE SECONDS POLICY HOST=IP...``: read an image from these parents for a time, in a guest.

Every byte read is compared. The last line of the output is a JSON object with what happened.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import sys
import threading
import time
from pathlib import Path

from drivers.attach.iscsi import IscsiAttach
from drivers.base import Image, Parent, PathState, Place
from tests.kernel.inside.iscsi_tools import SECRET
from tests.kernel.inside.parent import SIZE, content, image

READY = Path("/run/child-reads")
"""Is there while it reads with all parents usable."""

CHUNK = 64 << 10
FOLDER = Path("/run/child")


def main(name: str, seconds: str, policy: str, *parents: str) -> None:
    """Connect, read, disconnect, and say how it went."""
    lost: list[str] = []

    def note(_image: Image, parent: Parent) -> None:
        lost.append(parent.host)

    attach = IscsiAttach(Place(FOLDER, FOLDER, host=socket.gethostname(), path_policy=policy), lost=note)
    listed = [Parent(host, f"iscsi://{ip}:3260", SECRET) for host, _, ip in (word.partition("=") for word in parents)]
    began = time.monotonic()
    path = attach.connect(image(name), listed).path
    assert path is not None
    try:
        done = read_for(path, content(name), 0)  # one pass
        first_pass = time.monotonic() - began
        wait_for_all(attach, name)
        READY.touch()
        before = fetched()
        done |= read_for(path, content(name), float(seconds))
        states = [f"{status.parent.host} {status.state}" for status in attach.paths(name)]
        shares = [count - before[disk] for disk, count in fetched().items() if disk in before]
    finally:
        READY.unlink(missing_ok=True)
        attach.disconnect(name)
    print(json.dumps({**done, "first_pass": first_pass, "lost": lost, "paths": states, "shares": shares}))  # noqa: T201


def fetched() -> dict[str, int]:
    """Sectors read from each iSCSI disk."""
    return {file.parent.name: int(file.read_text().split()[2]) for file in Path("/sys/block").glob("sd*/stat")}


def wait_for_all(attach: IscsiAttach, name: str) -> None:
    """Wait until every parent is usable."""
    waiting = threading.Event()
    while any(status.state is PathState.LOST for status in attach.paths(name)):
        waiting.wait(0.05)


def read_for(path: Path, wanted: bytes, seconds: float) -> dict[str, float]:
    """Whole passes past the page cache until the time is over."""
    buffer = mmap.mmap(-1, CHUNK)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    worst, reads, end = 0.0, 0, time.monotonic() + seconds
    try:
        while True:
            for offset in range(0, SIZE, CHUNK):
                began = time.monotonic()
                os.preadv(fd, [buffer], offset)
                worst, reads = max(worst, time.monotonic() - began), reads + 1
                if buffer[:] != wanted[offset : offset + CHUNK]:
                    raise AssertionError(f"wrong bytes at {offset}")
            if time.monotonic() >= end:
                return {"worst": worst, "reads": reads}
    finally:
        os.close(fd)


if __name__ == "__main__":
    main(*sys.argv[1:])
